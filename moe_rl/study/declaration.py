"""A study is a declaration: a question, arms × factors × seeds, and what will be shown and decided.

    study = Study(name="routing_replay", question="…", arms=(grpo, replay, "gspo_short"), base=RunConfig(arm=grpo), …)

A user's own file does the same from anywhere: `moe-rl run my_study.py`. No torch here; `workers` carries a study out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from moe_rl.config import SHIPPED, Arm, RunConfig, plain
from moe_rl.errors import OLD_NAMES, ConfigError, RunError, renamed
from moe_rl.objectives.methods import arm as spelled_arm
from moe_rl.objectives.methods import spell_out
from moe_rl.registry import Component, lookup, split_list, unknown
from moe_rl.storage import folder as runs
from moe_rl.storage.folder import DECLARATION
from moe_rl.storage.provenance import path_in_checkout

COMES_ALONG = ("routing_replay",)
"""Studies that are part of the package, and need no file."""
ACROSS = "against:"
"""How the name of a figure over a factor begins."""
QUICK_STEPS = 3
TRAINER = "moe_rl.build:execute"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ARM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,:()-]{0,119}")
CONDITION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*")
UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")
PRESET_NAMES = (
    "qwen3_moe-tiny",
    "qwen3_moe-bench",
    "qwen3_moe-fine",
    "olmoe-tiny",
    "mixtral-tiny",
    "deepseek_v3-tiny",
    "gpt_oss-tiny",
    "glm4_moe-tiny",
)
"""The keys of `models.load.PRESETS`, which is not imported here."""


@dataclass(frozen=True)
class Planned:
    """One run of a study: where it lives, what it is, and the file that declares it."""

    path: Path
    config: RunConfig
    study_file: Path | None = None


@renamed(cells="conditions")
@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms × factors × seeds, and what they are for."""

    name: str
    question: str
    hypothesis: str
    arms: tuple[Arm | str, ...]
    """In the order in which tables and figures show them; an arm keeps its colour. A text is read as
    `moe_rl.objectives.methods.arm` does: `"sapo(tau_neg=1.05)+old_policy"`."""
    base: RunConfig
    """Settings of every run; its arm and seed are replaced."""
    seeds: tuple[int, ...] = (0, 1, 2)
    own_cold_starts: bool = False
    """Each seed begins from a cold start of its own, which its arms share; else all begin from `cold_start.seed`."""
    factors: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Dotted settings and their values, e.g. `{"cold_start.seed": (0, 1)}`: every combination is run."""
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Named variations of the base, for settings that vary together or one at a time, e.g. `{"N=2": {"mini_batches": 2,
    "steps": 400}}`; crossed with `factors`. A name of the form `key=value` can be drawn against like a factor. The key
    `arms` holds the names of those that run there, where not all do, `seeds` likewise the seeds."""
    figures: tuple[str, ...] = ("learning", "clipping", "expert_change", "ratio_spread", "variance_shares")
    """Names that `moe_rl.results.figures` knows, or `pkg.module:function`; `against:optimizer.lr` draws the endpoint
    over a factor."""
    endpoint: str = "reward, second half"
    """The one quantity that the arms are compared by: a metric of `moe_rl.results.summary`, a column of `steps`, or
    one's own, as in `metrics`."""
    further_endpoints: tuple[str, ...] = ()
    """Quantities that the arms are compared by as well, each in a table of its own: the rule says what for."""
    comparisons: tuple[tuple[str, str], ...] = ()
    """The comparisons decided on beforehand, as (arm, arm): first minus second, Holm over these and all combinations of
    factors. Without any, all pairs are compared and called exploratory."""
    metrics: tuple[str, ...] = ()
    """Rows of the summary beside the usual ones, named as `endpoint` names them; a `pkg.module:function` of one's own
    goes from the `Frames` of one run to a number."""
    decision_rule: str = ""
    verdict: str = ""
    """`pkg.module:function`, or `study.py:function` for a file beside the study's own: from the study's `Frames` to the
    sentences of its decision."""
    differs_from_paper: str = ""
    caution: str = ""
    """What the summary says under its table, so that nobody reads more into it than there is."""
    cost: str = ""
    seconds_per_step: float | None = None
    """Of one core, for the estimate that `--dry-run` prints."""
    seconds_of_warm_up: float = 0.0
    """Likewise, of each supervised warm-up."""
    trainer: str = TRAINER
    """What carries out a run: `execute(run, folder, *, cache, listen)`, imported in the worker process. A function
    `check(run)` beside it says beforehand what would make the run void, and refuses what cannot run."""
    file: Path | None = None
    """That it was read from, as `load_study_file` says; every run keeps a digest of it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arms", _made(self.arms))
        names, study = [arm.name for arm in _made(self.arms)], f"study {self.name!r}"
        for kind, label, form in (
            ("study", self.name, NAME),
            *(("arm", name, ARM) for name in names),
            *(("condition", name, CONDITION) for name in self.conditions),
        ):
            if not form.fullmatch(label):
                raise ConfigError(f"{kind} {label!r} cannot be the name of a folder: use letters, digits, '._-'")
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"the arms of {study} need different names, but have {names}")
        for a, b in self.comparisons:
            if a == b or not {a, b} <= set(names):
                raise ConfigError(f"the comparison {a} − {b} of {study} needs two of its arms {names}")
        for name, settings in self.conditions.items():
            if unknown := set(settings.get("arms", ())) - set(names):
                raise ConfigError(f"condition {name!r} of {study}: {sorted(unknown)} are not among its arms {names}")
            here = settings.get("seeds", self.seeds)
            if not isinstance(here, Sequence) or not here or set(here) - set(self.seeds):
                raise ConfigError(f"condition {name!r} of {study} has seeds={here!r}. The study has {[*self.seeds]}.")
        if self.own_cold_starts and "cold_start.seed" in self.factors:
            raise ConfigError("own_cold_starts gives each seed its own warm-up, so cold_start.seed cannot be a factor")
        varied = [*self.factors, *(key for settings in self.conditions.values() for key in settings)]
        if "steps" in self.factors or {"seed", "arm"} & {key.split(".")[0] for key in varied}:
            raise ConfigError("steps, seed and arm cannot be factors. Use --steps, `seeds` and `arms`.")

    def quick_form(self) -> Study:
        """A study of its own, `<name>-quick`, of one seed in all conditions: run it for QUICK_STEPS, as a trial."""
        conditions = {
            name: {k: v for k, v in condition.items() if k != "seeds"} for name, condition in self.conditions.items()
        }
        return dataclasses.replace(self, name=f"{self.name}-quick", seeds=self.seeds[:1], conditions=conditions)

    def with_settings(self, changes: Mapping[str, Any], conditions: Sequence[str] = ()) -> Study:
        """The study with another base. Raises ConfigError for a setting that a factor, or one of these of its
        `conditions` (default: all), gives values of its own."""
        chosen = self.with_conditions(conditions).conditions
        for key in changes:
            if factor := next((name for name in self.factors if f"{key}.".startswith(f"{name}.")), None):
                raise ConfigError(
                    f"{key} has no effect: study {self.name!r} gives the factor {factor} the values "
                    f"{', '.join(map(str, self.factors[factor]))}. Change them in its file."
                )
            for name, settings in chosen.items():
                if any(f"{key}.".startswith(f"{own}.") for own in settings):
                    raise ConfigError(
                        f"{key} cannot be set, because the condition {name!r} of study {self.name!r} sets it. Change "
                        "it in the study's file."
                    )
        return dataclasses.replace(self, base=self.base.replace(**changes))

    def with_arms(self, arms: Sequence[str], own_arms: Sequence[str] = ()) -> Study:
        """The study with other arms: `own_arms` and then `arms`, each the name of an arm of the study or a spelling;
        without any, all its arms. Comparisons and conditions keep the arms that are left. Raises ConfigError for one of
        `arms` that names an arm of the study and spells another."""
        own = {arm.name: arm for arm in _made(self.arms)}
        for text in arms:
            if text in own and (ambiguous := name_namesake(own[text])):
                raise ConfigError(
                    f"{ambiguous}. For the arm of the study, write --arms {text}; for the other, "
                    f'--arm "{text}+name=paper_{text}".'
                )
        chosen = tuple(own.get(text) or spelled_arm(text) for text in (*own_arms, *arms)) or _made(self.arms)
        names = {arm.name for arm in chosen}
        comparisons = tuple(pair for pair in self.comparisons if set(pair) <= names)
        conditions = {
            name: {**condition, "arms": tuple(n for n in condition["arms"] if n in names)}
            if "arms" in condition
            else condition
            for name, condition in self.conditions.items()
        }
        conditions = {name: condition for name, condition in conditions.items() if condition.get("arms", names)}
        if self.conditions and not conditions:
            raise ConfigError(f"no condition of study {self.name!r} runs {', '.join(sorted(names))}")
        return dataclasses.replace(self, arms=chosen, comparisons=comparisons, conditions=conditions)

    def with_conditions(self, names: Sequence[str]) -> Study:
        """The study in these of its named conditions, or in all. Raises ConfigError for another name."""
        for name in names:
            if name not in self.conditions:
                unknown(f"condition of study {self.name!r}", name, self.conditions)
        chosen = {name: settings for name, settings in self.conditions.items() if not names or name in names}
        return dataclasses.replace(self, conditions=chosen)

    def own_arms(self, text: str | None) -> list[str]:
        """Names of its own arms, as `--arms grpo,gspo` has them; commas in brackets belong to a name. Raises
        ConfigError for one that is not its own."""
        own = [arm.name for arm in _made(self.arms)]
        names = split_list(text)
        for name in names:
            if name not in own:
                unknown(f"arm of study {self.name!r}", name, own, "--arm takes any other arm")
        return names

    def runs(self, out: Path, seeds: Sequence[int] | None = None, steps: int | None = None) -> list[Planned]:
        """Every run and its folder `out/<study>/<arm>/<condition>/seed=<n>`: seed by seed, so that arms advance
        together.

        Raises ConfigError for settings no run can have, and for two combinations that would share a folder.
        """
        seeds = self.seeds if seeds is None else tuple(seeds)
        if not seeds or len(set(seeds)) < len(seeds):
            raise ConfigError(f"a study needs at least one seed, and each seed once, but got {list(seeds)}")
        planned: list[Planned] = []
        described: dict[Path, str] = {}
        combinations = itertools.product(self.conditions or {"": {}}, itertools.product(*self.factors.values()))
        for seed, (name, values), arm in itertools.product(seeds, combinations, _made(self.arms)):
            chosen = dict(zip(self.factors, values, strict=True))
            settings = {**self.conditions.get(name, {}), **chosen}
            here = settings.pop("arms", (arm.name,)), settings.pop("seeds", (seed,))
            if arm.name not in here[0] or seed not in here[1]:
                continue
            config = self.base.replace(**settings, arm=arm, seed=seed)
            config = config if steps is None else config.replace(steps=steps)
            if self.own_cold_starts:
                config = config.replace(**{"cold_start.seed": seed})
            config = located(config)
            labels = [name] * bool(name) + [f"{k}={re.sub(UNSAFE, '_', str(v))}" for k, v in chosen.items()]
            path = path_of(out, self.name, arm.name, ",".join(labels) or "base", seed)
            values_here = ", ".join([name] * bool(name) + [f"{k}={v!r}" for k, v in chosen.items()])
            if path in described:
                raise ConfigError(
                    f"{described[path]} and {values_here} of study {self.name!r} would share the folder "
                    f"{path.parent.name}. Name the conditions with `conditions`."
                )
            described[path] = values_here
            planned.append(Planned(path, config, self.file))
        if not planned:
            raise ConfigError(f"no condition of study {self.name!r} runs any of the seeds {list(seeds)}")
        return planned


def located(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths for the folder of a checkpoint and the file of a task, so that they are
    found from anywhere. Names of presets, of what comes with the package and of the hub stay as they are."""
    changes: dict[str, Any] = {"task": _located_task(Component.of(config.task))}
    folder = Path(config.model.name).expanduser()
    if folder.is_dir() and config.model.name not in (*SHIPPED, *PRESET_NAMES):
        changes["model.name"] = str(folder.absolute())
    return config.replace(**changes)


def _located_task(task: Component) -> Component:
    kind, _, file = task.name.partition(":")
    if kind == "jsonl" and file and file != task.options.get("benchmark"):
        return Component(f"jsonl:{os.path.abspath(Path(file).expanduser())}", **task.options)
    if kind == "mixture" and isinstance(mixed := task.options.get("tasks"), list | tuple):
        return Component(
            task.name, **{**task.options, "tasks": tuple(_located_task(Component.of(part)) for part in mixed)}
        )
    return task


def _made(arms: Sequence[Arm | str]) -> tuple[Arm, ...]:
    if isinstance(arms, str) or not all(isinstance(arm, Arm | str) for arm in arms):
        raise ConfigError(f"arms={arms!r} must be a list of arms or texts, e.g. arms=({'gspo'!r},)")
    return tuple(spelled_arm(arm) if isinstance(arm, str) else arm for arm in arms)


def name_namesake(arm: Arm) -> str:
    """That the name of an arm spells another arm, and which; empty where it spells none or this one."""
    with contextlib.suppress(ConfigError):
        if (other := spell_out(spelled_arm(arm.name))) != spell_out(arm):
            return f"arm {arm.name!r} of the study is {spell_out(arm)}, but as a text it is {other}"
    return ""


def path_of(out: Path, study: Any, arm: Any, condition: Any, seed: Any) -> Path:
    """The folder of a run. Raises ConfigError for a label that is no `folder_name`."""
    labels = {"study": study, "arm": arm, "condition": condition, "seed": f"seed={seed}"}
    return out.joinpath(*(runs.folder_name(kind, label) for kind, label in labels.items()))


OF_RUNS = {"arms", "base", "own_cold_starts", "seconds_per_step", "seconds_of_warm_up", "file"}
DECLARED = tuple(field.name for field in dataclasses.fields(Study) if field.name not in OF_RUNS)
"""What a `study.json` has of a study, beside the names of its arms and the path of its file in the checkout."""


def write_declaration(study: Study, out: Path, *, keep: bool = False) -> list[str]:
    """Write `study.json` beside the study's runs. Returns the keys, of the question and of the decision, in which an
    earlier one differs. With `keep`, the arms, comparisons and conditions of an earlier one stay, and those of
    `study` come after them."""
    content = plain({key: getattr(study, key) for key in DECLARED})
    content |= {
        "arms": [{"name": arm.name} for arm in _made(study.arms)],
        "file": path_in_checkout(study.file) if study.file else "",
    }
    (out / study.name).mkdir(parents=True, exist_ok=True)
    before = content
    with contextlib.suppress(RunError):  # a damaged entry is written anew
        before = runs.read_json(out / study.name / DECLARATION, ()) or content
    if keep:
        for key in ("arms", "comparisons"):
            there = before.get(key, [])
            known = {_json(entry) for entry in there}
            content[key] = [*there, *(entry for entry in content[key] if _json(entry) not in known)]
        content["conditions"] = {**content["conditions"], **before.get("conditions", {})}
    asked = ("question", "endpoint", "further_endpoints", "decision_rule", *(() if keep else ("arms", "comparisons")))
    changed = [key for key in asked if _json(before.get(key)) != _json(content[key])]
    runs.write_json(out / study.name / DECLARATION, content)
    return changed


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def read_declaration(folder: Path, trust: bool = False) -> dict[str, Any]:
    """The `study.json` of a folder of runs or of collected tables, which somebody else may have written. Without
    `trust` it lacks the figures, metrics and decision rule that are code from outside the package, and `untrusted`
    names them. Raises RunError for a missing file and for another format, ConfigError for a primary endpoint that is
    such code."""
    declared = runs.read_json(folder / DECLARATION, ("name", "arms"))
    if declared is None:
        raise RunError(f"{folder} is not the folder of a study: it has no {DECLARATION}")
    if "contrasts" in declared:
        raise RunError(f"{folder} has the names of columns and settings that release 0.1.0 had. Read it with 0.1.0.")
    if "cells" in declared:
        raise RunError(f"{folder / DECLARATION} has {OLD_NAMES}")
    defaults = {f.name: f.default for f in dataclasses.fields(Study) if f.name in DECLARED}
    defaults |= {"question": "", "hypothesis": "", "seeds": [], "factors": {}, "conditions": {}, "file": ""}
    declared = plain(defaults) | declared | {"folder": str(folder)}
    return declared | {"untrusted": ""} if trust else _leave_out_code(declared, folder)


def outside_names(declared: Mapping[str, Any]) -> list[str]:
    """Every `pkg.module:name` in a declaration, once each."""
    listed = [*declared["figures"], *declared["metrics"], *declared["further_endpoints"]]
    return [*filter(_is_outside, dict.fromkeys((declared["verdict"], declared["endpoint"], *listed)))]


def _is_outside(name: str) -> bool:
    """Whether a name is code. The metric of a figure over a factor may be code: `against:lag:pkg.module:name`."""
    if name.startswith(ACROSS):
        name = name.removeprefix(ACROSS).partition(":")[2]
    return bool(name) and Component(name).own


def _leave_out_code(declared: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    names = outside_names(declared)
    text = (
        f"{', '.join(names)} (in {folder / DECLARATION}) is code from outside moe_rl. Read that code; if you trust it, "
        "repeat the command with --trust."
    )
    if declared["endpoint"] in names:
        raise ConfigError(text)
    lists = ("figures", "metrics", "further_endpoints")
    inside = {key: [name for name in declared[key] if name not in names] for key in lists}
    verdict = "" if declared["verdict"] in names else declared["verdict"]
    return {**declared, **inside, "verdict": verdict, "untrusted": text if names else ""}


def load_study_file(source: str) -> Study:
    """The `study` object of a Python file, of a module `pkg.module`, or of one in the package, by its name. A file's
    folder becomes importable.

    Raises ConfigError when there is no such file, when it cannot be imported, or when it declares no study.
    """
    path = Path(source)
    if path.suffix == ".py" and path.is_file():
        module = load_file(path)
    elif (
        path.suffix == ".py"
        or path.is_dir()
        or (source not in COMES_ALONG and importlib.util.find_spec(source.partition(".")[0]) is None)
    ):
        known = [*COMES_ALONG, *map(str, (path if path.is_dir() else path.parent).glob("*.py"))]
        unknown("study", source, known, "create one with `moe-rl new NAME`")
    else:
        module = importlib.import_module(f"{__package__}.{source}" if source in COMES_ALONG else source)
    study = getattr(module, "study", None)
    if not isinstance(study, Study):
        raise ConfigError(f"{source} declares no study. Add a line `study = Study(...)`.")
    return dataclasses.replace(study, file=Path(module.__file__).absolute() if module.__file__ else None)


def load_file(path: Path) -> ModuleType:
    """A Python file as a module of its name; its folder becomes importable. Raises ConfigError where it fails."""
    name = path.stem
    if name in sys.stdlib_module_names or name == __package__.partition(".")[0]:
        raise ConfigError(f"the study file {path} would replace the module {name!r}. Rename the file.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a file of Python has both"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        line = error if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1]
        where = f"{line.filename}:{line.lineno}"
        raise ConfigError(f"{path} cannot be imported: {where}: {type(error).__name__}: {error}") from error
    return module


def find_study_file(name: str | None, tables: Path) -> Path | None:
    """The study file that has this path in a checkout: under that path or its name alone, in the folder of tables, in a
    folder above it, or above the current folder."""
    if not name or ".." in PurePosixPath(name).parts:
        return None
    roots = [tables.absolute(), *tables.absolute().parents, Path.cwd(), *Path.cwd().parents]
    places = (root / form for root in roots for form in (name, PurePosixPath(name).name))
    return next((place for place in places if place.is_file()), None)


def load_verdict(name: str, study: str, file: Path | None) -> Callable[[Any], Any]:
    """The function of `Study.verdict`: of a module, or of a Python file beside the study's file. Raises ConfigError for
    a missing function, and for a file of another study."""
    beside, _, function = name.rpartition(":")
    if not beside.endswith(".py"):
        return lookup("verdict", name, {})
    if file is None or not file.with_name(beside).is_file():
        raise ConfigError(f"the verdict {name!r} needs {beside} beside the study's file, which was not found")
    module = load_file(file.with_name(beside))
    declared = getattr(module, "study", None)
    if isinstance(declared, Study) and declared.name != study.removesuffix("-quick"):
        raise ConfigError(f"the verdict {name!r} is not of {study!r}: {module.__file__} declares {declared.name!r}")
    if not callable(verdict := getattr(module, function, None)):
        raise ConfigError(f"{module.__file__} has no function {function!r}")
    return verdict
