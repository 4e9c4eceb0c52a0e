"""A declared study as verl's configuration, and verl's log as our tables; `make test-verl` runs the trainer itself."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess

import pytest

from moe_rl.cli import main
from moe_rl.config import ModelConfig, RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.integrations.verl.log import entries, read_log
from moe_rl.integrations.verl.losses import loss_of
from moe_rl.integrations.verl.reward import compute_score, row_of
from moe_rl.integrations.verl.rollouts import read_rollouts
from moe_rl.integrations.verl.settings import Data, check_settings, overrides_of
from moe_rl.integrations.verl.study import _follow, check
from moe_rl.models.load import load, save_checkpoint
from moe_rl.objectives.methods import arm
from moe_rl.registry import Component
from moe_rl.rollouts.batches import Collector
from moe_rl.rollouts.hf import HFEngine
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import read_table
from moe_rl.tasks.base import held_out, load_task


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    loaded = load(ModelConfig(), 0)
    save_checkpoint(loaded.model, loaded.tokenizer, folder)
    return folder


@pytest.fixture
def run(checkpoint):
    base = RunConfig(
        arm=arm("gspo(clip_low=0.02,clip_high=0.03)+old_policy"),
        model=ModelConfig(name=str(checkpoint)),
        seed=3,
        steps=4,
        prompts_per_step=6,
        group_size=5,
        mini_batches=3,
        epochs=2,
        engine="vllm",
        max_new_tokens=9,
        eval_prompts=8,
        eval_every=2,
        micro_batch=7,
        temperature=0.8,
    )
    return base.replace(**{"cold_start.target": 0, "optimizer.lr": 1e-3, "measure.responses": 11})


def settings(run, tmp_path, *further):
    """By their keys, as verl's command line has them."""
    return dict(text.removeprefix("++").split("=", 1) for text in overrides_of(run, tmp_path, further))


def test_what_a_study_declares_becomes_settings_of_verl(run, tmp_path):
    found, actor = settings(run, tmp_path), "actor_rollout_ref.actor."
    assert (
        found[f"{actor}policy_loss.loss_mode"]
        == '"moe_rl:gspo(clip_low=0.02,clip_high=0.03)' + "+name='gspo(clip_low=0.02,clip_high=0.03)+old_policy'\""
    )
    expected = {
        f"{actor}loss_agg_mode": '"seq-mean-token-mean"',
        f"{actor}fsdp_config.router_replay.mode": '"R2"',
        f"{actor}ppo_mini_batch_size": "2",
        f"{actor}fsdp_config.router_replay.updates_per_step": "6",
        f"{actor}optim.lr": "0.001",
        "actor_rollout_ref.rollout.n": "5",
        "actor_rollout_ref.rollout.name": '"vllm"',
        "actor_rollout_ref.model.path": f'"{run.model.name}"',
        "data.train_batch_size": "6",
        "data.max_prompt_length": "13",
        "trainer.rollout_data_dir": f'"{tmp_path}/rollouts"',
        f"{actor}ppo_max_token_len_per_gpu": f"{7 * (13 + 9)}",
        "algorithm.rollout_correction.bypass_mode": "false",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": "false",
    }
    assert {key: found[key] for key in expected} == expected
    assert settings(run.replace(**{"measure.rollouts": 0}), tmp_path)["trainer.rollout_data_dir"] == "null"


@pytest.mark.parametrize(
    "routes, mode, of_rollout",
    [
        ("live", "disabled", "false"),
        ("rollout", "R3", "true"),
        (Component("soft", ratio=0.5), "moe_rl:soft(ratio=0.5)", "false"),
        (Component("by_layer", first=2, base="rollout"), "moe_rl:by_layer(first=2, base='rollout')", "true"),
    ],
)
def test_routes_become_a_mode_of_replay(run, tmp_path, routes, mode, of_rollout):
    found = settings(run.replace(**{"arm.routes": routes}), tmp_path)
    assert json.loads(found["actor_rollout_ref.actor.fsdp_config.router_replay.mode"]) == mode
    assert found["actor_rollout_ref.rollout.enable_rollout_routing_replay"] == of_rollout


def test_a_checkpoint_beside_the_study_is_found_from_verl_s_own_folder(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)
    found = settings(run.replace(**{"model.name": checkpoint.name}), tmp_path)
    assert found["actor_rollout_ref.model.path"] == f'"{checkpoint}"'


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    "word",
    [
        "data.train_batch_size=8",
        f"{ACTOR}.fsdp_config.router_replay={{mode:R3}}",
        f"{ACTOR}.optim={{lr:1.0}}",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16",
        f"++{ACTOR}.optim.override_optimizer_config.eps=1",
        f"{ACTOR}.optim=null",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.5",
        f"{ROLLOUT}.top_p=0.5",
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        "custom_reward_function.path=x",
        "reward.custom_reward_function.name=x",
        f"{ACTOR}.fsdp_config.router_replay._target_=x",
        "trainer.nnodes",
        "~trainer.nnodes",
        "model_engine=megatron",
        "actor@actor_rollout_ref.actor=megatron_actor",
    ],
)
def test_what_a_study_decides_is_decided_however_it_is_written(run, tmp_path, word):
    with pytest.raises(ConfigError, match=rf"verl\.{re.escape(word)}: "):
        overrides_of(run, tmp_path, [word])


@pytest.mark.parametrize(
    "word", ["trainer.nnodes=2", "+ray_kwargs.ray_init.num_gpus=1", f"+{ROLLOUT}.engine_kwargs.vllm={{a:'b, c:d'}}"]
)
def test_other_words_reach_verl_as_they_are(run, tmp_path, word):
    words = overrides_of(run, tmp_path, [word])
    assert word in words and not [other for other in words if other.startswith("++trainer.nnodes=")] * (
        "nnodes" in word
    )


@pytest.mark.parametrize(
    "change, weights, compute, sums, engine",
    [
        ({}, "fp32", "fp32", "fp32", "float32"),
        ({"model.dtype": "bfloat16"}, "bf16", "bf16", "bf16", "bfloat16"),
        (
            {"policy": "fsdp(compute_dtype=bfloat16)", "engine": "vllm(dtype=bfloat16)"},
            "fp32",
            "bf16",
            "fp32",
            "bfloat16",
        ),
    ],
)
def test_weights_sums_forwards_and_engine_have_dtypes_of_their_own(
    run, tmp_path, change, weights, compute, sums, engine
):
    changed = run.replace(**change)
    words, fsdp = settings(changed, tmp_path), f"{ACTOR}.fsdp_config"
    mixed = f'{{param_dtype:"{compute}",reduce_dtype:"{sums}",buffer_dtype:"{sums}"}}'
    assert (words[f"{fsdp}.model_dtype"], words[f"{fsdp}.mixed_precision"]) == (f'"{weights}"', mixed)
    assert words[f"{ROLLOUT}.dtype"] == f'"{engine}"'
    assert ["compute_dtype=bfloat16" in caution for caution in check(changed)][1:] == [True] * (weights == "bf16")


REFUSED = {
    "router_noise.scale": 2.0,
    "batches": "lagged(lag=2)",
    "policy": "megatron(tp=2)",
    "policy  ": "own:policy",
    "stop": ("x",),
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "optimizer.warmup": 3,
    "optimizer.name": "sgd",
    "optimizer.router_lr_scale": 0.0,
    "optimizer.loss_free_bias": 1e-3,
    "model.router_dtype": "float32",
    "cold_start.target": 0.3,
    "hf_checkpoints": (1,),
    "measure.full": True,
    "measure.gradient_cosine": True,
    "arm.ratio_routes": "rollout",
    "model.overrides": {"num_experts": 4},
    "engine": "hf",
    "engine ": "vllm(gpu_memory=0.5)",
    "engine  ": "vllm(dtype=float16)",
    "policy ": "fsdp(reduce=update)",
    "mini_batches": 4,
    "optimizer.grad_clip": 0.0,
    "model.dtype": "float16",
    "model.name": "qwen3_moe-tiny",
}


@pytest.mark.parametrize("key, value", REFUSED.items())
def test_what_verl_cannot_do_is_refused_by_its_name(run, key, value):
    check_settings(run)
    with pytest.raises(ConfigError, match=rf"^{key.strip().replace('.', '[.]')}="):
        check_settings(run.replace(**{key.strip(): value}))


@pytest.mark.parametrize(
    "written, message",
    [
        ("grpo+recall", "recall"),
        ("grpo+kl(coef=0.1)", "terms.*use_kl_loss"),
        ("grpo+under_noise(sigma=0.1)", "under_noise"),
        ("grpo+old_policy+anchor=engine", "arm.anchor=engine"),
        ("grpo+advantage=normalized(scale=none)", "advantage"),
        ("grpo+truncated(cap=2.0)", "rollout_correction"),
        ("rloo", "algorithm.adv_estimator"),
        ("dr_grpo", "algorithm.adv_est"),
        ("grpo+finished", "rollout_correction"),
        ("rspo", "router"),
        ("clip_cov", "mini_batch"),
        ("overlong_filter", "filters"),
    ],
)
def test_arms_that_verl_cannot_train_are_refused(run, written, message):
    with pytest.raises(ConfigError, match=message):
        check_settings(run.replace(arm=arm(written)))


def test_routes_and_anchors_are_no_part_of_a_loss_of_verl():
    for written, message in (("grpo+old_policy", "replay.mode"), ("topr+anchor=engine", "bypass_mode")):
        with pytest.raises(ConfigError, match=message):
            loss_of(arm(written))


def test_prompts_are_those_of_our_trainer_step_by_step(run):
    data, task, loaded = Data.of(run), load_task(run.task), load(run.model, 0)
    collector = Collector(
        run=run,
        task=task,
        engine=HFEngine(loaded.model, loaded.tokenizer),
        tokenizer=loaded.tokenizer,
        held_out=held_out(task, 8),
    )
    for step in range(run.steps):
        assert data.train[step * 6 : step * 6 + 6] == collector.draw_prompts(6, step + 1)
    assert [prompt.text for prompt in data.held_out] == [prompt.text for prompt in collector.held_out]


def test_the_reward_is_the_task_s(run):
    prompt = load_task(run.task).prompts(1, 0)[0]
    row = row_of(json.dumps({"name": "running_sums", "options": {"digits": 12, "partial": True}}), prompt, 0)
    for text, score, right in ((prompt.answer, 1, 1), (prompt.answer[:6], 0.5, 0)):
        assert compute_score(row["data_source"], text, "", row["extra_info"]) == {"score": score, "acc": right}


# ---------------------------------------------------------------------- logs
FIRST = {
    "actor/routing/coverage": 1.0,
    "actor/routing/pull": 0.25,
    "actor/routing/token_ess": 0.9,
    "actor/routing/update_01/token_ess": 1.0,
    "actor/routing/update_02/token_ess": 0.8,
    "actor/routing/update_02/load_entropy": 0.8,
    "actor/routing/step_expert_change_rate": 0.15,
    "actor/routing/step_expert_change_rate/layer_01": 0.1,
    "actor/routing/step_expert_change_rate/layer_03": 0.2,
    "actor/routing/load_max_violation/layer_03": 0.9,
    "actor/routing/update_02/expert_change_rate": 0.06,
    "actor/routing/engine_kl_k3": 1e-9,
    "actor/routing/engine_expert_change_rate": 0.03,
    "actor/routing/engine_expert_change_rate/layer_01": 0.03,
    "critic/score/mean": 0.5,
    "val-core/moe_rl/acc/mean@1": 0.25,
    "val-aux/moe_rl/reward/mean@1": 0.375,
    "timing_s/step": 2.0,
    "actor/grad_norm": None,
}


def write(file, *lines):
    file.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in lines))
    return file


def test_a_log_becomes_rows(tmp_path):
    rows = read_log([write(tmp_path / "a.jsonl", (0, {"val-core/x/acc/mean@1": 0.125}), (1, FIRST))], active=True)
    assert rows["steps"] == [
        {"step": 0, "eval_exact_greedy": 0.125},
        {
            "step": 1,
            "reward": 0.5,
            "own_pull": 0.25,
            "own_token_ess": 0.9,
            "own_coverage": 1.0,
            "own_engine_kl_k3": 1e-9,
            "engine_expert_change_rate": 0.03,
            "expert_change_rate": 0.15,
            "eval_exact_greedy": 0.25,
            "eval_reward_greedy": 0.375,
            "seconds_step": 2.0,
        },
    ]
    assert rows["updates"] == [
        {"step": 1, "update": 1, "token_ess": 1.0},
        {"step": 1, "update": 2, "token_ess": 0.8, "expert_change_rate": 0.06},
    ]
    assert rows["layers"] == [
        {"step": 1, "moe_layer": 0, "layer": 1, "expert_change_rate": 0.1},
        {"step": 1, "moe_layer": 1, "layer": 3, "expert_change_rate": 0.2},
    ]


def test_a_log_is_read_on_from_where_it_ended(tmp_path):
    whole = write(tmp_path / "a.jsonl", (1, FIRST), (2, FIRST | {"critic/score/mean": 0.75})).read_bytes()
    part, cut = tmp_path / "b.jsonl", whole.index(b"\n") + 30
    part.write_bytes(whole[:cut])
    first, end = entries(part)
    part.write_bytes(whole)
    second, _ = entries(part, end)
    assert [step for step, _ in first] == [1] and end < cut
    assert first + second == entries(tmp_path / "a.jsonl")[0] and second[0][1]["critic/score/mean"] == 0.75


def test_a_listener_gets_the_evaluation_before_the_first_step(run, tmp_path):
    file, given = write(tmp_path / "a.jsonl", (0, {"val-core/x/acc/mean@1": 0.125}), (1, FIRST)), []
    with RunFolder.open(tmp_path / "run", run.to_dict(), run.hash) as folder:
        _follow(subprocess.Popen(["true"]), folder, [file], lambda rows: given.append(rows["steps"]))
    assert given == [[row] for row in read_log([file])["steps"]] and len(given) == 2


def test_several_held_out_sets_have_a_column_each(tmp_path):
    both = {f"val-core/{name}/acc/mean@1": value for name, value in (("openai/gsm8k", 0.25), ("MATH-500", 0.75))}
    rows = read_log([write(tmp_path / "a.jsonl", (1, both), (2, {"val-core/MATH-500/acc/mean@1": 0.5}))])["steps"]
    assert rows == [
        {"step": 1, "own_eval_exact_greedy_openai_gsm8k": 0.25, "own_eval_exact_greedy_MATH_500": 0.75},
        {"step": 2, "eval_exact_greedy": 0.5},
    ]


def test_of_a_step_that_was_made_twice_the_later_one_counts(tmp_path):
    first = write(tmp_path / "a.jsonl", (1, FIRST), (2, FIRST))
    first.write_text(first.read_text()[:-30])  # killed while it wrote
    again = write(tmp_path / "b.jsonl", (2, FIRST | {"critic/score/mean": 0.75}))
    assert [row["reward"] for row in read_log([first, again])["steps"]] == [0.5, 0.75]


def test_a_trainer_that_goes_on_evaluates_before_its_next_step(tmp_path):
    first = write(tmp_path / "a.jsonl", (1, FIRST))
    again = write(tmp_path / "b.jsonl", (1, {"val-core/moe_rl/acc/mean@1": 0.5}), (2, FIRST))
    rows = read_log([first, again], active=True)["steps"]
    assert [(row["reward"], row["eval_exact_greedy"]) for row in rows] == [(0.5, 0.5), (0.5, 0.25)]


def test_a_step_that_was_saved_and_not_logged_has_its_evaluation_alone(tmp_path):
    first = write(tmp_path / "a.jsonl", (0, {"val-core/x/acc/mean@1": 0.125}), (1, FIRST))
    again = write(tmp_path / "b.jsonl", (2, {"val-core/x/acc/mean@1": 0.5}), (3, FIRST))
    rows = read_log([first, again], active=True)
    assert rows["steps"][2] == {"step": 2, "eval_exact_greedy": 0.5}
    assert [row["step"] for row in rows["updates"]] == [1, 1, 3, 3]


def test_a_log_without_coverage_is_refused_where_moe_rl_must_be_active(tmp_path):
    file = write(tmp_path / "a.jsonl", (1, FIRST), (2, {"critic/score/mean": 0.5}))
    assert len(read_log([file])["steps"]) == 2
    with pytest.raises(RunError, match="step 2 "):
        read_log([file], active=True)
    for text in ("", "step:1 - critic/score/mean:0.5\n", "[1]\n"):
        file.write_text(text)
        with pytest.raises(RunError, match="a.jsonl"):
            read_log([file])


# ---------------------------------------------------------------------- the command
DECLARED = """
from moe_rl.config import Arm, ColdStart, ModelConfig, RunConfig
from moe_rl.study.declaration import Study

study = Study(name="in_verl", question="?", hypothesis="!", arms=("grpo+old_policy", "sapo"), seeds=(0,),
              base=RunConfig(arm=Arm(name="a"), model=ModelConfig(name={name!r}), cold_start=ColdStart(target=0),
                             steps=2, prompts_per_step=4, mini_batches=2, eval_prompts=8, engine="vllm"))
"""


def test_a_dry_run_prints_verl_s_command_and_starts_nothing(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "declared.py").write_text(DECLARED.format(name=str(checkpoint)))
    call = ["run", "declared.py", "--trainer", "verl", "--dry-run"]
    assert main([*call, "--set", "verl.trainer.n_gpus_per_node=8", "--set", "cold_start.target=0"]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "python-mverl.trainer.main_ppo" in shown and "trainer.n_gpus_per_node=8" in shown
    assert "verl/train.parquet" in shown and not (tmp_path / "runs").exists()
    first, others = shown.split("thesamefor")
    assert first.count("verl.trainer.main_ppo") == 1 and '"moe_rl:sapo"' in others and "main_ppo" not in others
    if importlib.util.find_spec("verl") is None:
        assert main(call[:-1]) == 2 and "--trainer verl needs verl" in capsys.readouterr().err
    assert main([*call, "--set", "router_noise.scale=2.0"]) == 2
    assert "router_noise.scale=2.0" in capsys.readouterr().err
    assert main([*call[:-2], "skyrl", "--dry-run"]) == 2
    assert "no trainer is called 'skyrl'" in capsys.readouterr().err


def test_a_run_that_somebody_made_by_hand_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [(step, FIRST | {"critic/score/mean": step / 8}) for step in (1, 2, 3, 4)]
    write(tmp_path / "gsm8k.jsonl", *lines)
    assert main(["runs", "import", "gsm8k.jsonl", "--to", "runs/mine/gspo/base/seed=0"]) == 0
    assert main(["plot", "runs/mine"]) == 0
    out = capsys.readouterr().out
    assert "reward, " in out and "second half" in out and "no figure" not in out
    assert {file.stem for file in (tmp_path / "runs/mine/figures").iterdir()} >= {"learning", "expert_change"}
    assert main(["report", "runs/mine"]) == 0 and main(["runs", "show", "runs/mine/gspo/base/seed=0"]) == 0
    capsys.readouterr()
    for log, seed, message in (
        ("gsm8k", 0, "runs/mine/gspo/base/seed=0 already exists. Give a new folder."),
        ("none", 1, "log none.jsonl not found"),
    ):
        assert main(["runs", "import", f"{log}.jsonl", "--to", f"runs/mine/gspo/base/seed={seed}"]) == 2
        assert capsys.readouterr().err == f"moe-rl: {message}\n"


def test_an_imported_run_claims_no_settings_and_cannot_be_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "gsm8k.jsonl", (1, FIRST), (2, FIRST))
    assert main(["runs", "import", "gsm8k.jsonl", "--to", "runs/mine/gspo/base/seed=0"]) == 0
    assert main(["report", "runs/mine"]) == 0
    page = (tmp_path / "runs/mine/report.html").read_text()
    assert "running_sums" not in page and "optimizer.lr" not in page and "torch" not in page
    assert "<td>steps</td><td>2</td>" in page and "moe-rl runs repeat" not in page
    assert main(["plot", "runs/mine"]) == 0 and "does not replay" not in capsys.readouterr().out
    assert main(["runs", "repeat", "runs/mine", "--out", "again"]) == 2
    assert "imported" in capsys.readouterr().err


def dump(folder, step, *scores):
    folder.mkdir(exist_ok=True)
    lines = [
        {"input": f"{n // 4}+1=", "output": f"said {n}", "gts": "1", "score": score, "step": step, "uid": f"{n}"}
        for n, score in enumerate(scores)
    ]
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_rollouts_that_verl_wrote_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "gsm8k.jsonl", (1, FIRST), (2, FIRST))
    for step, scores in ((1, [0.5, 0.25]), (2, [n / 32 for n in range(29)]), (3, [1.0])):
        dump(tmp_path / "dump", step, *scores)
    call = ["runs", "import", "gsm8k.jsonl", "--to", "runs/mine/gspo/base/seed=0", "--rollouts", "dump"]
    assert main(call) == 0
    found = read_table(tmp_path / "runs/mine/gspo/base/seed=0", "rollouts")
    assert found["step"].tolist() == [1] * 2 + [2] * 8, "the log ends before step 3"
    assert found["reward"].tolist()[2:] == [n / 32 for n in range(0, 29, 4)]
    assert found["group"].tolist()[2:] == [*range(8)]
    assert main(["runs", "read", "runs/mine/gspo/base/seed=0", "--best", "1"]) == 0
    out = capsys.readouterr().out
    assert "step 2, rollout 28  reward 0.875" in out and "7+1=" in out and "said 28" in out
    assert "nan" not in out and "clipped" not in out and "furthest" not in out
    assert main(["runs", "read", "runs/mine/gspo/base/seed=0", "--page", "read.html"]) == 0
    assert "NaN" not in (tmp_path / "read.html").read_text().partition("<script>")[0]
    assert [row["reward"] for row in read_rollouts(tmp_path / "dump", 2, 3)] == [0.25, 0.5, 0, 14 / 32, 28 / 32]
    with pytest.raises(ConfigError, match="from 1 to 2"):
        read_rollouts(tmp_path, 2)
    (tmp_path / "dump" / "1.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    with pytest.raises(ConfigError, match="1.jsonl, line 1"):
        read_rollouts(tmp_path / "dump", 2)
