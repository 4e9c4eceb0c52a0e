"""The recipe for other trainers is run as it stands in the docs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from moe_rl.routing import record_routing
from tests.conftest import build, python_block

PAGE = Path(__file__).parents[1] / "docs" / "your_trainer.md"


def block(part):
    return python_block(PAGE.read_text(), part)


def setting(checkpointing=False):
    """What the recipe takes as given: eight rows of unequal length, three of them prompt."""
    model = build("qwen3_moe")
    if checkpointing:
        model.train().gradient_checkpointing_enable()
    lengths = torch.tensor([12, 9, 7, 12, 5, 8, 12, 10])[:, None]
    time = torch.arange(12)
    tokens = torch.randint(3, 48, (8, 12), generator=torch.Generator().manual_seed(2)).where(time < lengths, 0)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3),
        "tokens": tokens,
        "attention_mask": time < lengths,
        "completion": (time >= 3) & (time < lengths),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -1.0, 0.5, -0.5]),
    }


def test_the_plain_loop_replays_and_measures(capsys):
    names, used = setting(), []

    def see(_, args):
        used.append((torch.is_grad_enabled(), args[1].clone()))

    names["model"].model.layers[1].mlp.experts.register_forward_pre_hook(see)
    exec(block("ratio_statistics"), names)
    (_, old), (_, first), (_, second), (_, new) = used
    assert [graded for graded, _ in used] == [False, True, True, False]
    old, new = (ids.view(8, 11, -1) for ids in (old, new))
    forced = torch.cat([first, second]).view(8, 11, -1)
    mask = names["mask"]
    assert torch.equal(forced[mask], old[mask]) and not torch.equal(new[mask], old[mask])
    variances = [float(line) for line in capsys.readouterr().out.splitlines()[:2]]
    assert variances[0] < 1e-12 < variances[1]
    decides = names["decides"]
    changed = [len(set(a) - set(b)) / 2 for a, b in zip(old[decides].tolist(), new[decides].tolist(), strict=True)]
    expert_change_rate = names["change"].moe_layer_rows()[1]["expert_change_rate"]
    assert abs(expert_change_rate - sum(changed) / len(changed)) < 1e-12 and expert_change_rate > 0


def test_the_plain_loop_gives_the_same_weights_under_activation_checkpointing(capsys):
    plain, checkpointed = setting(), setting(checkpointing=True)
    for names in (plain, checkpointed):
        exec(block("ratio_statistics"), names)
    for a, b in zip(plain["model"].parameters(), checkpointed["model"].parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_arms_of_the_page_are_computed_as_it_says(capsys):
    names = setting()
    exec(block("ratio_statistics"), names)
    names |= {"rewards": torch.tensor([1.0, 0.0] * 4), "engine_logprobs": names["old_logprobs"] - 0.01}
    exec(block("correction_weights"), names)
    made, decides = names["made"], names["decides"]
    assert set(made[decides].tolist()) == {0.5, -0.5} and not made[~decides].any()
    assert torch.allclose(names["factors"][decides], torch.tensor(0.01).exp())
    losses = [names[name].loss for name in ("output", "against_engine")]
    assert all(loss.requires_grad and loss.isfinite() for loss in losses)


def test_routes_that_an_engine_recorded_become_the_trace_that_the_model_recorded(capsys):
    names = setting()
    names |= {"inputs": names["tokens"][:, :-1], "mask": names["attention_mask"][:, :-1]}
    with torch.no_grad(), record_routing(names["model"]) as recording:
        names["model"](input_ids=names["inputs"], attention_mask=names["mask"])
    routes = recording.trace(names["inputs"], names["mask"])
    names["texts"] = [row[there].tolist() for row, there in zip(names["tokens"], names["attention_mask"], strict=True)]
    names["reported"] = [ids[: len(text) - 1].numpy() for ids, text in zip(routes.ids(), names["texts"], strict=True)]
    exec(block("decode_routes"), names)
    known = torch.arange(11) < names["attention_mask"].sum(1)[:, None] - 1
    assert torch.equal(names["engine_routes"].ids()[known], routes.ids()[known])
    assert float(capsys.readouterr().out) == known.sum() / names["mask"].sum()


def test_traces_are_spliced_and_read_in_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = setting()
    with torch.no_grad(), record_routing(names["model"]) as recording:
        names["model"](input_ids=names["tokens"], attention_mask=names["attention_mask"])
    trace = replace(recording.trace(names["tokens"], names["attention_mask"]), weight_version="7")
    names |= {"mask": names["attention_mask"], "rank": 1, "world": 2, "other_whole": trace}
    names |= {"first": trace, "second": trace, "third": trace, "one": trace.rows(slice(0, 4))}
    exec(block("splice"), names | {"other": trace.rows(slice(4, 8))})
    assert capsys.readouterr().out == "1.0\n"
