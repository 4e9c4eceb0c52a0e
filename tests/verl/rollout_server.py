"""The smallest rollout that verl's trainers accept: a Hugging Face model in an actor of Ray, which samples on a CPU,
reports routes, and is given new weights after every step. Imported by VERL_USE_EXTERNAL_MODULES in every process."""

from __future__ import annotations

import contextlib
import os
import re

import numpy as np
import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

import tests.verl.cpu_platform  # noqa: F401

NAME = "hugging_face"


async def nothing(self, *_, **__):
    return None


class Server:
    """One copy of the model, with the verbs that verl's replicas have."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing

    def __init__(self, path, eos, wants_routes, limit, seed):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.eos, self.wants_routes, self.limit, self.step = eos, wants_routes, limit, None
        self.generator = torch.Generator().manual_seed(seed)

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None, **_):
        from moe_rl.routing import record_routing

        limit = min(sampling_params.get("max_tokens") or self.limit, self.limit)
        tokens, logprobs = list(prompt_ids), []
        scope = record_routing(self.model) if self.wants_routes else contextlib.nullcontext()
        with torch.inference_mode(), scope as recording:
            cache, read = None, 0
            while len(logprobs) < limit and (not logprobs or tokens[-1] != self.eos):
                out = self.model(input_ids=torch.tensor([tokens[read:]]), past_key_values=cache, use_cache=True)
                cache, read = out.past_key_values, len(tokens)
                choice = out.logits[0, -1].log_softmax(-1)
                greedy = sampling_params.get("temperature") == 0  # as verl evaluates
                tokens.append(
                    int(choice.argmax() if greedy else torch.multinomial(choice.exp(), 1, generator=self.generator))
                )
                logprobs.append(float(choice[tokens[-1]]))
        routes = (
            None
            if recording is None
            else np.asarray(recording.trace(torch.tensor([tokens])).experts[0, :-1].to(torch.int16))
        )  # the last was never an input
        return TokenOutput(
            token_ids=tokens[len(prompt_ids) :],
            log_probs=logprobs,
            routed_experts=routes,
            stop_reason="completed",
            extra_fields={"global_steps": self.step},
        )

    async def load_weights(self, state, step):
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        self.step = step


class Replica(RolloutReplica):
    async def launch_servers(self):
        from verl.utils.config import omega_conf_to_dataclass

        model, config = omega_conf_to_dataclass(self.model_config), self.config
        self._server_address = f"{NAME}_{self.replica_rank}"
        self._server_handle = (
            ray.remote(num_cpus=0)(Server)
            .options(name=self._server_address, max_concurrency=100)
            .remote(
                model.local_path,
                model.tokenizer.eos_token_id,
                config.enable_rollout_routing_replay,
                config.response_length,
                self.replica_rank,
            )
        )
        self.servers = [self._server_handle]


class Adapter(BaseRollout):
    """In the training worker: sends weights to the server of its replica."""

    resume = release = nothing

    def __init__(self, config, model_config, device_mesh, replica_rank=-1):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    async def update_weights(self, weights, global_steps=None, **_):
        state = packed({name: tensor.detach().cpu().clone() for name, tensor in weights})
        await ray.get_actor(f"{NAME}_{self.replica_rank}").load_weights.remote(state, global_steps)


def packed(state):
    """verl sends the experts one by one, as checkpoints have them; transformers 5 has them in one tensor."""
    found, parts = {}, {}
    for name, tensor in state.items():
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight", name):
            parts.setdefault(match[1], {}).setdefault(match[2], []).append(tensor)  # in the order of the experts
        else:
            found[name] = tensor
    for name, experts in parts.items():
        gate, up, down = (torch.stack(experts[which]) for which in ("gate", "up", "down"))
        found |= {f"{name}.gate_up_proj": torch.cat([gate, up], 1), f"{name}.down_proj": down}
    return found


RolloutReplicaRegistry.register(NAME, lambda: Replica)
_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.Adapter"  # there is no public way
