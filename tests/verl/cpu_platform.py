"""A platform for CPUs, and process groups on gloo. VERL_USE_EXTERNAL_MODULES names it to all of verl.

verl has no platform for CPUs. `GPU` is a logical resource of Ray here: start Ray with as many as there are workers.
"""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist
import verl.utils.distributed as verl_distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class DeviceModule:
    """torch.cpu, and zeros for what only devices with their own memory have."""

    def mem_get_info(self, *_):
        return 0, 0

    def get_device_name(self, *_):
        return "cpu"

    def __getattr__(self, name):
        return getattr(torch.cpu, name, lambda *_, **__: 0)


MODULE = DeviceModule()


def nothing(self, *_, **__):
    return None


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    device_name, vendor_name = "cpu", "cpu"
    device_module = property(lambda self: MODULE)
    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False


def on_gloo(timeout_second=None, backend=None):
    """verl asks for "cpu:gloo,cpu:gloo", which torch refuses."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )


verl_distributed.initialize_global_process_group_ray = on_gloo
shard = FullyShardedDataParallel.__init__


def shard_on_cpu(self, module, *args, **settings):
    """FSDP1 sends weights to other ranks by devices alone. Here every rank has read them."""
    shard(self, module, *args, **settings | {"sync_module_states": False, "device_id": torch.device("cpu")})


FullyShardedDataParallel.__init__ = shard_on_cpu
