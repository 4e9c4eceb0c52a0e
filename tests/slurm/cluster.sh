#!/bin/bash
# A SLURM of one node in a folder of its own, as root, without systemd, cgroups or a database; for tests alone.
#   cluster.sh up FOLDER CPUS         starts it: then SLURM_CONF=FOLDER/slurm.conf
#   cluster.sh controller FOLDER      starts the controller again, after it was killed
#   cluster.sh down FOLDER            cancels what runs there, and stops it
set -u
what=$1 dir=$(realpath -m "$2") port=${SLURM_TEST_PORT:-16817}
export SLURM_CONF=$dir/slurm.conf

up() {
  mkdir -p "$dir"/{munge,state,spool,log} && chmod 755 "$dir" && chmod 711 "$dir"/munge
  dd if=/dev/urandom of="$dir"/munge/key bs=1 count=1024 status=none && chmod 400 "$dir"/munge/key
  munged --force --key-file="$dir"/munge/key --socket="$dir"/munge/socket --pid-file="$dir"/munge/pid \
         --log-file="$dir"/munge/log --seed-file="$dir"/munge/seed || return 1
  # cred_expire: a requeued job waits that long. The preempting partition warns with USR1, then TERM after GraceTime.
  cat > "$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort=$port
SlurmdPort=$((port + 1))
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MinJobAge=3600
MaxArraySize=1001
NodeName=$(hostname) NodeAddr=127.0.0.1 CPUs=$1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
  slurmctld && slurmd || return 1
  for _ in $(seq 1200); do sinfo -h -o %T 2> /dev/null | grep -qx idle && return 0; sleep 0.1; done
  echo "SLURM did not come up; see $dir/log" >&2
  return 1
}

down() {
  scancel --user="$(id -un)" 2> /dev/null
  for _ in $(seq 1200); do  # a step that outlived its controller would report to it for ever, and slurmd wait for it
    squeue --noheader 2> /dev/null | grep -q . || break
    sleep 0.2
  done
  for file in slurmd.pid slurmctld.pid munge/pid; do
    [ ! -f "$dir/$file" ] || kill "$(cat "$dir/$file")" 2> /dev/null
  done
}

case "$what" in
  up) up "$3" ;;
  controller) slurmctld ;;
  down) down ;;
esac
