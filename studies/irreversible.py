"""Once GRPO has collapsed, does going back, other clip ranges, longer generation or other queries help?

Pilots, GRPO of `small.BASE`: at a constant 6.7e-4 seed 100 lost the reward of its cold start within six steps, so that
there was nothing learned to go back to. With a linear warm-up to 8e-4 over 40 steps seeds 100 and 101 reached .6 and
collapsed at steps 37 and 40. Restarts of seed 100: unchanged it collapsed again from both states; at 2e-4 it came back
from the checkpoint before, and to about half from the collapsed state. Queries of 4 to 12 digits were tried and earned
nothing, since the cold start knows 12 only; those of the study have 12.
"""

from small import BASE, DIFFERS, SECONDS, grpo

from moe_rl.config import Measure
from moe_rl.study import Study

study = Study(
    name="irreversible",
    question="Can training be resumed after a collapse, from the collapsed state or from a checkpoint before it?",
    hypothesis="Resuming is unavailing, even from a previous checkpoint and with other clip ranges, longer generation "
    "or other queries (GSPO, arXiv 2507.18071, section 3).",
    arms=(grpo,),
    base=BASE.replace(**{
        "steps": 70, "optimizer.lr": 8e-4, "optimizer.warmup": 320, "eval_every": 70, "save_every": 35,
        "measure": Measure(responses=2, detail_every=70, rollouts=0),
    }),
    seeds=tuple(range(520, 528)),
    own_cold_starts=True,
    figures=("learning",),
    decision_rule="GRPO's rate rises linearly to 8e-4 over 40 steps and stays. If the reward collapses (EMA10 below "
    "half of its best for 20 steps; onset: the first of them), the run goes on for 18 steps from two states, which are "
    "kept every fifth step with their moments: `collapsed`, the first at which the collapse is established, and "
    "`before`, the last at least 10 steps before the onset. From each with new prompts and noise: unchanged; narrower "
    "and wider clip (.1/.135, .4/.54, GRPO's being .2/.27); longer generation (26 tokens for 13); other queries "
    "(digits 0 to 4); Routing Replay; GSPO; a constant rate of 2e-4 with fresh moments. A restart recovers if the "
    "mean reward on held-out prompts of 12 digits after each of its last 5 steps is at least half of the best EMA10 "
    "before the onset. Per start and variant, over the seeds that collapsed: irreversible if so few recover that an "
    "exact binomial test of one half rejects at 5 %, one-sided (at most 1 of 8), reversible if so many do (at least 7 "
    "of 8), else undetermined at n. The claim, per start, over the five variants of the paper (unchanged to other "
    "queries): reproduced if all five are irreversible; contradicted if one is reversible at 1 % (5 % over five; 8 of "
    "8); else undetermined. Replay, GSPO and the low rate have verdicts of their own: 'hyper-parameters (e.g. the "
    "clipping ranges)' does not say whether the rate is one. Machinery: from a kept state the run's own next two "
    "rewards come out within 1e-6, and first rewards of variants with the same queries and length are equal, or the "
    "study is void. Seeds that do not collapse by step 51 are counted and left out; below 5 that did, all is "
    "undetermined. Everything else, such as groups without signal, is exploratory. Stopping: 8 runs.",
    differs_from_paper=DIFFERS,
    caution="the collapse is brought about by a rising rate, where the paper does not say what caused its own; "
    "restarts keep to that rate but for one, and are watched for 18 steps; rewards are 0 or 1, so a policy "
    "that earns none has no gradient at all.",
    cost="Restarts cost about 3 minutes of one core per seed, cold starts 30 s.",
    quick={"prompts_per_step": 2, "mini_batches": 2},
    seconds_per_step=SECONDS + 2.5,
    trainer="irreversible_trainer:execute",
)
