"""Words spelled backward, and running sums of 48 digits, with rollouts two steps old: do GSPO or TIS help GRPO when
every method has its own best learning rate?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import BASE, ENDPOINT, SECONDARY, grpo, lagged  # noqa: E402
from contrasts import Condition, Form, Gains, Rule, judged_by, spoken  # noqa: E402
from other_tasks.pilot import TASKS, narrow, tis, wide  # noqa: E402
from other_tasks.pilot import study as pilot  # noqa: E402

from moe_rl.study import Study  # noqa: E402

CHOSEN = {"spell_backward": {grpo.name: 5e-5, narrow.name: 5e-5, wide.name: 5e-5, tis.name: 1e-4}}
"""Task → arm → the rate that the pilot chose. Running sums of 48 digits come when their pilot has chosen."""


def condition(task: str, rate: float) -> str:
    """The name of a task at a rate."""
    return f"{task},rate={rate:g}"


def value(task: str, arm: str) -> Form:
    """An arm at its own rate."""
    return Condition(condition(task, CHOSEN[task][arm]))[arm]


RULES = {
    task: Rule(
        ENDPOINT,
        SECONDARY,
        {task: {f"{a} − grpo, {task}": value(task, a) - value(task, grpo.name) for a in rates if a != grpo.name}},
        gates=(Gains(value(task, grpo.name)),),
    )
    for task, rates in CHOSEN.items()
}
CORRECTED = "Holm over the three comparisons of a task"

study = Study(
    name="other_tasks",
    question="On two other tasks, words spelled backward and running sums of 48 digits, with rollouts two steps old: "
    "do GSPO, with either of two clip ranges, or TIS help GRPO when every method has its own best learning rate?",
    hypothesis="On neither task does GSPO or TIS differ from GRPO by .02 or more.",
    arms=(grpo, narrow, wide, tis),
    base=BASE.replace(**lagged(2)),
    seeds=tuple(range(3710, 3726)),
    own_cold_starts=True,
    conditions={
        condition(task, rate): {**TASKS[task], "optimizer.lr": rate, "arms": tuple(a for a in of if of[a] == rate)}
        for task, of in CHOSEN.items()
        for rate in dict.fromkeys(of.values())
    },
    figures=(),
    endpoint=ENDPOINT,
    further_endpoints=(SECONDARY,),
    metrics=("token_ess", "token_kl_k3"),
    verdict="study.py:verdict",
    decision_rule="Primary endpoint: sampled exact match on 256 held-out prompts, mean of the evaluations after steps "
    "30, 35, 40, 45 and 50. Secondary: greedy exact match, likewise. Rates are those that the pilot chose on other "
    "seeds, for each arm and task by itself. The contrasts stand in this file (RULES): three within each task; exact "
    "two-sided sign flips over seeds, Holm at 5 % within each task. An effect: decided in the primary endpoint, and "
    "the secondary not decided (5 %, not adjusted) with the other sign. Else no difference that matters, if the 90 % "
    "interval (Student's t) lies within ±.02. Else undecided. Gate: on each task GRPO ends above its start in greedy "
    "match (mean over seeds); where it fails, nothing is concluded of that task. Stopping: 16 seeds, 50 steps; a "
    "diverged run matches nothing from there on. Outcomes of a task are looked at when all of its runs are there.",
    differs_from_paper=pilot.differs_from_paper,
    caution="four pilot seeds chose the rates, from steps of a factor of two; GRPO's clip range is its default. One "
    "lag, one size and 50 steps. The reward of spelling backward is partial, and exact match is not what it rewards.",
    cost="64 runs of 50 steps on each task; warm-ups of 16 seeds come on top.",
    seconds_per_step=1.2,
    seconds_of_warm_up=120,
)


judged = judged_by(RULES)
verdict = spoken(judged, *RULES.values())
