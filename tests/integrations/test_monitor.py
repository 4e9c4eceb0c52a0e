"""The monitor says what the package's own recorder says, in whatever the model is wrapped, and changes nothing."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import warnings
from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_rl
from moe_rl.build import build as build_run
from moe_rl.errors import AuxLossSilentlyOn, ConfigError, RoutingError
from moe_rl.metrics.ratios import ratio_statistics
from moe_rl.recorder import Recorder
from moe_rl.routing import record_routing, replay_routing
from moe_rl.storage.columns import COLUMNS, unknown
from moe_rl.storage.folder import RunFolder
from moe_rl.trainer import train
from tests.conftest import build, perturb, python_block
from tests.test_trainer import ARMS, TINY

pytestmark = pytest.mark.filterwarnings("ignore::moe_rl.errors.AuxLossSilentlyOn")
MASK = torch.arange(9) < torch.tensor([9, 7, 9, 4])[:, None]
DECIDES = (torch.arange(9) >= 2) & MASK & (torch.arange(9) < 8)


def close(mine, theirs):
    assert mine == pytest.approx(theirs, rel=0, abs=1e-6, nan_ok=True)


def close_where_both_say(mine, theirs):
    """The names of which both have a number."""
    both = {name for name in mine.keys() & theirs.keys() if theirs[name] == theirs[name]}
    close({name: mine[name] for name in both}, {name: theirs[name] for name in both})
    return both


# ---------------------------------------------------------------------- the recorder's own numbers, of a real run
class Watching(Recorder):
    """Monitors beside a run's own recorder, of the same model and tokens."""

    checked: list[dict] = []

    def begin(self, step, batch, unconstrained, split):
        super().begin(step, batch, unconstrained, split)
        self.of_update = moe_rl.monitor(self.policy.model)

    def start_probe(self):
        whole = super().start_probe()
        model, probe, batch, unconstrained = self.policy.model, whole.batch, self.batch, self.unconstrained
        inputs = {"input_ids": probe.tokens[:, :-1], "decides": probe.response_mask[:, 1:]}
        self.of_step = moe_rl.monitor(model, probe=inputs)
        with self.of_step:
            self.of_step.engine(unconstrained.logprobs, batch.rollout_logprobs, batch.response_mask)
        return whole

    def before(self, update, part, probed):
        super().before(update, part, probed)
        self.of_update.__enter__()
        self.of_update.decides(part.response_mask[:, 1:])

    def after(self, update, part, updated, probed):
        self.of_update.__exit__(None, None, None)
        super().after(update, part, updated, probed)
        row, theirs = self.of_update.row(), self.updates[-1]
        if part.routes is not None:
            assert row.keys() == {"pull", "coverage"}
            close_where_both_say(row, theirs)

    def end(self, push_gap, probed):
        rows = super().end(push_gap, probed)
        row, layers, (theirs,) = self.of_step.row(), self.of_step.layers, rows["steps"]
        assert not unknown("layers", {name for layer in layers for name in layer})
        for mine, recorded in zip(layers, rows["layers"], strict=True):
            said = close_where_both_say(mine, recorded)
            assert self.probe.scores is None or said == mine.keys(), "at a detail step a layer has all of it"
        said = close_where_both_say(row, theirs)
        alone = {name for name in row if name.startswith(("load_", "margin_", "router_confidence"))}
        assert self.probe.scores is None or said == row.keys() - alone
        for name in ("load_entropy", "load_max_violation", "load_dead_experts"):
            close(row[name], sum(layer[name] for layer in rows["layers"]) / len(layers))
        self.checked.append(row)
        return rows


@pytest.mark.parametrize("arm", ["grpo", "replay"])
def test_its_numbers_are_those_of_the_recorder(arm, tmp_path):
    run = TINY.replace(arm=ARMS[arm], steps=2, eval_every=2, mini_batches=2)
    Watching.checked = []
    with RunFolder.open(tmp_path / "run", run.to_dict(), run.hash) as folder:
        parts = build_run(run, folder.path, tmp_path)
        folder.finish(train(run, replace(parts, recorder=Watching), folder, lambda rows: None))
    first, second = Watching.checked
    assert (
        first.keys() <= COLUMNS.keys() and {"expert_change_rate", "router_confidence", "engine_kl_k3"} <= second.keys()
    )
    assert second["expert_change_rate"] > 0 and second["router_shift"] > 0


# ---------------------------------------------------------------------- worked by hand, and without a probe
def test_the_forwards_of_a_block_are_counted_together_and_by_hand(qwen, tokens):
    monitor = moe_rl.monitor(qwen)
    with torch.no_grad(), monitor:
        qwen(tokens[:2], attention_mask=MASK[:2])
        monitor.decides(DECIDES[2:])
        qwen(input_ids=tokens[2:], attention_mask=MASK[2:])
    row = monitor.row()
    with torch.no_grad(), record_routing(qwen, scores=True) as recording:
        qwen(tokens, attention_mask=MASK)
    counted = torch.cat([MASK[:2], DECIDES[2:]])
    ids, scores = recording.trace(tokens).ids()[counted], recording.scores(4)
    violation, mass = [], []
    for moe_layer in range(3):
        count = [ids[:, moe_layer].flatten().tolist().count(expert) for expert in range(8)]
        violation.append(max(count) / (sum(count) / 8) - 1)
        softmax = scores.all_log_probs[moe_layer][counted].exp()
        mass += [softmax[t, ids[t, moe_layer]].sum().item() for t in range(len(ids))]
    close(row["load_max_violation"], sum(violation) / 3)
    close(row["router_confidence"], sum(mass) / len(mass))
    assert row["margin_n"] == counted.sum() * 3 and len(monitor.layers) == 3
    assert monitor.row() == {}, "asked before"


def test_embeddings_have_the_padding_and_the_rows_of_their_tokens(qwen, tokens):
    given = {"input_ids": tokens}, {"inputs_embeds": qwen.get_input_embeddings()(tokens).detach()}
    rows = []
    for batch in given:
        watching, probing = moe_rl.monitor(qwen), moe_rl.monitor(qwen, probe=batch | {"attention_mask": MASK})
        with torch.no_grad(), probing, watching:
            qwen(**batch, attention_mask=MASK)
        rows.append([watching.row()])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing was trained
            rows[-1].append(probing.row())
    assert repr(rows[0]) == repr(rows[1]) and rows[0][0]["margin_n"] == MASK.sum() * 3


def generate(model):
    model.generate(
        torch.tensor([[0, 0, 5, 6]]),
        attention_mask=torch.tensor([[0, 0, 1, 1]]),
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
    )


def test_generation_is_counted_once_per_token_where_nothing_trains(qwen):
    with torch.no_grad(), moe_rl.monitor(qwen) as monitor:
        generate(qwen)
    assert monitor.row()["margin_n"] == 3 * (2 + 3), "two real tokens of the prompt, and three that were inputs again"


@pytest.mark.parametrize("checkpointing", [None, False, True])  # whether it re-enters
@pytest.mark.parametrize("mode", [True, False])
def test_sampling_and_scoring_in_a_block_do_not_count(mode, checkpointing, tokens):
    model = build("qwen3_moe").train(mode)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    with moe_rl.monitor(model, router_aux_loss_coef=0.0) as monitor:
        model.eval()
        generate(model)
        with torch.no_grad():
            model(tokens, attention_mask=MASK)
        model.train(mode)
        with torch.no_grad():
            model(tokens, attention_mask=MASK)
        for part in (slice(0, 1), slice(1, 4)):  # of one mini-batch
            model(tokens[part], attention_mask=MASK[part]).logits.logsumexp(-1).mean().backward()
        with torch.no_grad():
            monitor.decides(DECIDES)
            model(tokens, attention_mask=MASK)
    row = monitor.row()
    assert row["load_tokens"] == MASK.sum() + DECIDES.sum() and row["margin_n"] == 3 * row["load_tokens"]


@pytest.mark.parametrize("layer", [0, 2])
def test_what_a_failed_forward_was_given_is_not_said_of_the_next(layer, qwen, tokens):
    with moe_rl.monitor(qwen, router_aux_loss_coef=0.0) as monitor:
        hook = qwen.model.layers[layer].register_forward_pre_hook(lambda *_: 1 / 0)
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(ZeroDivisionError):
                qwen(tokens, attention_mask=MASK)
        hook.remove()
        with pytest.raises(RoutingError, match="4 rows"):
            qwen(tokens)
        qwen(tokens, attention_mask=MASK)
    assert monitor.row()["load_tokens"] == MASK.sum()


@pytest.mark.parametrize("mask", [None, torch.zeros(4, 1, 9, 9), torch.ones(1, 9)])
def test_a_forward_that_counts_needs_a_mask_of_its_inputs(mask, qwen, tokens):
    with moe_rl.monitor(qwen, router_aux_loss_coef=0.0) as monitor:
        with torch.no_grad():
            qwen(tokens)  # it does not count
        with pytest.raises(RoutingError, match="attention_mask"):
            qwen(tokens, attention_mask=mask)
        monitor.decides(DECIDES)
        qwen(tokens, attention_mask=mask)
    assert monitor.row()["load_tokens"] == DECIDES.sum()
    with pytest.raises(ConfigError, match="attention_mask"):
        moe_rl.monitor(qwen, probe={"input_ids": tokens, "attention_mask": mask})


@pytest.mark.parametrize("probed", [True, False])
def test_routers_without_finite_scores_make_the_row_nan(probed, qwen, tokens):
    inputs = {"input_ids": tokens, "attention_mask": MASK}
    monitor = moe_rl.monitor(qwen, probe=inputs if probed else None, router_aux_loss_coef=0.0)
    broken = qwen.model.layers[2].mlp.gate.weight
    if not probed:
        broken.data[3] = torch.nan
    with monitor:
        qwen(**inputs)
    broken.data[3] = torch.nan
    with pytest.warns(UserWarning, match=rf"layers\.2\.mlp\.gate: .*finite for {MASK.sum()}"):
        row = monitor.row()
    assert {name for name, value in row.items() if value == value} == {"load_tokens"} and "load_entropy" in row
    assert [layer["load_entropy"] == layer["load_entropy"] for layer in monitor.layers] == [True, True, False]
    assert not probed or [layer["expert_change_rate"] for layer in monitor.layers][:2] == [0, 0]


# ---------------------------------------------------------------------- in wrappers
def drift(model):
    """Move every weight by a function of itself, so that a shard moves as its part of the whole."""
    with torch.no_grad():
        for parameter in model.parameters():
            here = getattr(parameter, "to_local", lambda parameter=parameter: parameter)()
            here.add_(torch.sin(97 * here) * 0.05)


def row_of(model, rows, tokens):
    """Of a probe and of a replayed forward in between, of these rows."""
    probe = {"input_ids": tokens[rows], "attention_mask": MASK[rows], "decides": DECIDES[rows]}
    monitor = moe_rl.monitor(model, probe=probe)
    with torch.no_grad(), record_routing(model) as recording:
        model(tokens[rows], attention_mask=MASK[rows])
    with monitor:
        drift(model)
        with torch.no_grad(), replay_routing(model, recording.trace(tokens[rows], MASK[rows])):
            model(tokens[rows], attention_mask=MASK[rows])
        monitor.engine(-tokens[rows] / 50, -tokens[rows] / 49, DECIDES[rows])
    return monitor.row()


def on_rank(rank, folder, tokens):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    rows = slice(0, 3) if rank == 0 else slice(3, 4)
    sharded = build("qwen3_moe")
    for layer in sharded.model.layers:
        fully_shard(layer)
    found = {"FSDP2": row_of(fully_shard(sharded), rows, tokens)}
    found["DDP"] = row_of(DistributedDataParallel(build("qwen3_moe")), rows, tokens)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="FSDP2 of torch 2.6 needs a card")
def test_ddp_and_fsdp2_on_two_ranks_say_what_one_process_says_of_all_rows(tmp_path, tokens):
    ranks = [multiprocessing.get_context("fork").Process(target=on_rank, args=(r, tmp_path, tokens)) for r in (0, 1)]
    for process in ranks:
        process.start()
    alone = row_of(build("qwen3_moe"), slice(None), tokens)
    assert alone["expert_change_rate"] > 0 and alone["pull"] > 0
    for process in ranks:
        process.join()
    for rank in (0, 1):
        for name, row in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            assert row.keys() == alone.keys(), name
            close(row, alone)


# ---------------------------------------------------------------------- it changes nothing
def trained(monitor_of, tokens):
    """Weights after two steps in train mode, with dropout, and the model."""
    model = build("qwen3_moe", attention_dropout=0.2).train()
    model.gradient_checkpointing_enable()
    optimizer, monitor = torch.optim.AdamW(model.parameters(), lr=1e-3), monitor_of(model)
    torch.manual_seed(5)
    for _ in range(2):
        with monitor:
            model(tokens, attention_mask=MASK).logits.log_softmax(-1)[..., 3].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.row()
    return model


def test_a_monitored_model_trains_to_the_same_bits_and_nothing_stays_on_it(tokens):
    class Nothing:
        __enter__ = __exit__ = row = lambda *_: None

    plain = trained(lambda model: Nothing(), tokens)
    probe = {"input_ids": tokens, "attention_mask": MASK}
    watched = trained(lambda model: moe_rl.monitor(model, probe=probe, every=2), tokens)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert watched.training and all("forward" not in m.__dict__ and not m._forward_pre_hooks for m in watched.modules())


@pytest.mark.parametrize("since", ["step", "start"])
def test_a_row_compares_with_the_step_or_with_the_start(since, qwen, tokens):
    probe, rows, traces = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, [], []
    monitor = moe_rl.monitor(qwen, probe=probe, every=2, since=since)
    for step in range(4):
        with torch.no_grad(), record_routing(qwen) as recording:
            qwen(tokens)
        traces.append(recording.trace(tokens))
        with monitor:
            pass
        perturb(qwen, seed=step)
        rows.append(monitor.row())
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(tokens)
    assert rows[0] == rows[2] == {}
    first = traces[3] if since == "step" else traces[0]
    same = (first.ids()[..., None] == recording.trace(tokens).ids()[..., None, :]).any(-1)
    close(rows[3]["expert_change_rate"], 1 - same.double().mean().item())


# ---------------------------------------------------------------------- balancing that nobody asked for
@pytest.mark.parametrize(
    "family, overrides, coefficient, said",
    [
        ("qwen3_moe", {}, None, "=0.001."),
        ("qwen3_moe", {}, 0.0, None),
        ("qwen3_moe", {"router_aux_loss_coef": 0.0}, 0.01, "=0.01."),
        ("qwen3_moe", {"router_aux_loss_coef": 0.0}, None, None),
        ("deepseek_v3", {}, None, None),
    ],
)
def test_an_auxiliary_loss_in_the_configuration_is_said_once(family, overrides, coefficient, said):
    monitor = moe_rl.monitor(
        torch.nn.ModuleDict({"model": build(family, **overrides)})["model"], router_aux_loss_coef=coefficient
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            with monitor:
                pass
    texts = [str(w.message) for w in found if w.category is AuxLossSilentlyOn]
    assert len(texts) == (said is not None) and all(said in text and family in text for text in texts)


@pytest.mark.parametrize("replays, moves, warned", [(True, True, True), (True, False, False), (False, True, False)])
def test_a_bias_that_moves_under_replay_is_named(replays, moves, warned, tokens):
    model = build("deepseek_v3")
    with torch.no_grad(), record_routing(model) as recording:
        model(tokens)
    monitor = moe_rl.monitor(model)
    with torch.no_grad(), monitor, replay_routing(model, recording.trace(tokens) if replays else None):
        model(tokens, attention_mask=torch.ones_like(tokens))
    if moves:
        model.model.layers[1].mlp.gate.e_score_correction_bias += 0.001
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        monitor.row()
    texts = [str(w.message) for w in found if w.category is AuxLossSilentlyOn]
    assert bool(texts) == warned and all("model.layers.1.mlp.gate.e_score_correction_bias" in text for text in texts)


# ---------------------------------------------------------------------- ratios
def test_ratios_of_all_micro_batches_have_the_names_of_the_dictionary(qwen, tokens):
    draw = torch.Generator().manual_seed(0)
    old, new = (torch.randn(4, 130, generator=draw) * 0.3 for _ in range(2))
    mask = torch.rand(4, 130, generator=draw) < 0.9
    monitor = moe_rl.monitor(qwen)
    with torch.no_grad(), monitor:
        qwen(tokens, attention_mask=MASK)
        for part in (slice(0, 1), slice(1, 4)):
            monitor.ratios(new[part], old[part], mask[part])
    row = monitor.row()
    close_where_both_say(row, ratio_statistics(new - old, mask))
    assert {"token_n", "token_ess", "token_kl_k3"} <= row.keys() <= COLUMNS.keys() and row["token_n"] == mask.sum()


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "settings, value",
    [
        (dict(every=0), "every=0"),
        (dict(since="step 0"), "step 0"),
        (dict(probe={"tokens": DECIDES}), "tokens"),
        (dict(probe={"input_ids": DECIDES.long()}), "input_ids"),
        (dict(probe={"input_ids": DECIDES.long(), "decides": torch.zeros_like(DECIDES)}), "decides"),
        (dict(probe={"input_ids": DECIDES.long(), "decides": ~MASK, "attention_mask": MASK}), "padding"),
        (dict(probe={"input_ids": DECIDES.long(), "decides": DECIDES[:, :8]}), r"\[4, 8\]"),
    ],
)
def test_settings_that_cannot_be_are_refused(qwen, settings, value):
    with pytest.raises(ConfigError, match=value):
        moe_rl.monitor(qwen, **settings)


def test_calls_out_of_order_are_refused(qwen, tokens):
    monitor = moe_rl.monitor(qwen)
    for call in (monitor.row, lambda: monitor.decides(DECIDES)):
        with pytest.raises(RoutingError, match="block"):
            call()
    with monitor:
        with pytest.raises(RoutingError, match="already in a block"):
            monitor.__enter__()
        with pytest.raises(RoutingError, match="inside a block"):
            monitor.row()
        monitor.decides(DECIDES[:, :8])
        with pytest.raises(RoutingError, match=r"\(4, 8\)"):
            qwen(tokens)
        with torch.no_grad():
            qwen(tokens, attention_mask=MASK)
    with pytest.raises(RoutingError, match="no forward"):
        monitor.row()
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(tokens)
    probed = moe_rl.monitor(qwen, probe={"input_ids": tokens, "attention_mask": MASK})
    with replay_routing(qwen, recording.trace(tokens)):
        qwen(tokens)
        with pytest.raises(RoutingError, match="replay_routing"), probed:
            pass


@pytest.mark.parametrize("give", ["engine", "ratios"])
def test_log_probs_that_cannot_be_are_refused(qwen, tokens, give):
    honest, late = -torch.rand(4, 9), -torch.rand(4, 9)
    late[1, 2] = -torch.inf
    with moe_rl.monitor(qwen) as monitor:
        call = inspect.unwrap(getattr(type(monitor), give))
        call(monitor, honest, honest, MASK)
        for pair, mask, value in (
            ((honest, honest[:, :8]), MASK, r"\[4, 8\]"),
            ((honest[:1], honest), MASK, r"\[1, 9\]"),
            ((honest, honest), MASK[:, :1], r"\[4, 1\]"),
            ((honest, honest), MASK.float(), "float32"),
            ((honest, late), MASK, "1 of 29"),
            ((honest.exp(), honest), MASK, "29 of 29"),
            ((honest, -honest), MASK, "29 of 29"),
        ):
            with pytest.raises(ConfigError, match=value):
                call(monitor, *pair, mask)


def test_routers_that_hand_out_no_scores_still_have_a_load(tokens):
    from tests.routing.families import FAMILIES
    from tests.routing.families import build as tiny

    family = next(f for f in FAMILIES if f.scores_since is None)
    model = tiny(family)
    monitor = moe_rl.monitor(model)
    with torch.no_grad(), pytest.warns(UserWarning, match="router_confidence"), monitor:
        for _ in range(2):
            model(tokens, attention_mask=torch.ones_like(tokens))
    row = monitor.row()
    assert "load_entropy" in row and "router_confidence" not in row


def test_the_plain_loop_of_the_page_runs_as_it_stands(qwen, tokens, capsys):
    page = (Path(__file__).parents[2] / "docs" / "your_trainer.md").read_text()
    block = python_block(page, "every=2")
    optimizer = torch.optim.AdamW(qwen.parameters(), lr=3e-3)
    names = {
        "model": qwen,
        "optimizer": optimizer,
        "probe": {"input_ids": tokens, "attention_mask": MASK},
        "steps": [[{"input_ids": tokens[rows], "attention_mask": MASK[rows]} for rows in ([0, 1], [2, 3])]] * 4,
        "loss": lambda output: output.logits.log_softmax(-1)[..., 3].mean(),
        "log": print,
        "writer": Writer(),
    }
    exec(block, names)
    printed = [line for line in capsys.readouterr().out.splitlines() if "expert_change_rate" in line]
    assert len(printed) == 2 and "load_entropy" in printed[0]
    points = names["writer"].points
    assert {f"moe_rl/{name}" for name in literal_eval(printed[0])} <= {name for name, _ in points}
    assert points["moe_rl/expert_change_rate", 4] == literal_eval(printed[1])["expert_change_rate"]
    of_layer = names["monitor"].layers[1]["expert_change_rate"]
    assert points["moe_rl/expert_change_rate/moe_layer_1", 4] == of_layer and {step for _, step in points} == {2, 4}


class Writer:
    """What TensorBoard's SummaryWriter has."""

    def __init__(self):
        self.points = {}

    def add_scalar(self, name, value, step):
        self.points[name, step] = value


def test_a_run_of_wandb_gets_a_row_at_a_time_and_its_axis(qwen, tokens):
    class Run:
        def __init__(self):
            self.logged, self.axes = [], {}

        def log(self, values):
            self.logged.append(values)

        def define_metric(self, name, step_metric):
            self.axes[name] = step_metric

    run, monitor = Run(), moe_rl.monitor(qwen)
    assert moe_rl.track(monitor, run) is monitor
    with monitor:
        qwen(tokens, attention_mask=torch.ones_like(tokens))
    row = monitor.row()
    (logged,) = run.logged
    assert logged["moe_rl/block"] == 1 and logged["moe_rl/load_tokens"] == row["load_tokens"]
    assert run.axes == {"moe_rl/*": "moe_rl/block"} and monitor.row() == {} and len(run.logged) == 1
    with pytest.raises(ConfigError, match="no add_scalar or log"):
        moe_rl.track(monitor, "runs/tensorboard")


# ---------------------------------------------------------------------- between two rows


def step_outside(model, monitor):
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    torch.optim.SGD(model.parameters(), lr=0.3).step()


def fail_in_block(model, monitor):
    with pytest.raises(MemoryError), monitor:
        step_outside(model, monitor)
        raise MemoryError


@pytest.mark.filterwarnings("ignore:the routing of the probe")
@pytest.mark.parametrize("between", [step_outside, fail_in_block])
def test_what_happens_between_two_rows_is_no_part_of_the_next(qwen, tokens, between):
    torch.manual_seed(0)
    monitor = moe_rl.monitor(qwen, probe={"input_ids": tokens, "attention_mask": MASK})
    with monitor:
        pass
    monitor.row()
    between(qwen, monitor)
    with monitor:
        pass
    assert monitor.row()["expert_change_rate"] == 0
