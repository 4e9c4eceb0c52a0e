"""The paper's actual claim without training noise: how good is each arm's gradient on stale mini-batches?"""

from small import BASE, DIFFERS, SECONDS, grpo

from moe_rl.study import Study

study = Study(
    name="gradient_quality",
    question="At a fixed policy, how well does each arm's gradient on the j-th mini-batch of a stale batch estimate "
    "the on-policy gradient?",
    hypothesis="GRPO's gradients get noisier with j than those of GRPO with Routing Replay and of GSPO (GSPO, arXiv "
    "2507.18071, sections 3 and 5.3: token-level ratios bring high-variance noise, which routing changes make worse).",
    arms=(grpo,),
    base=BASE.replace(steps=20),
    seeds=(34, 35, 36, 37),
    own_cold_starts=True,
    figures=("expert_change",),
    decision_rule="At the cold start and after 20 steps of GRPO: on the path of one GRPO step, before each of its 8 "
    "updates, gradients of GRPO, GRPO + replay, GSPO, GSPO + replay on 48 mini-batches of 16 responses from the step's "
    "old policy, against the gradient of 4,096 responses from the current policy to fresh prompts, natural routes. "
    "Machinery: at j = 1 all arms agree to 1e-4. Primary: the cosine of one mini-batch with the on-policy gradient at "
    "j = 8, mean of both stops: replay − GRPO and GSPO − GRPO, 97.5 % Student t over 4 seeds. Above 0: reproduced (as "
    "to the cosine); below: reversed; else undetermined at n = 4. A row whose reference is mostly noise (attenuation "
    "below .7) voids its seed. Bias and variance relative to the squared on-policy gradient, single stops, and all "
    "other j, are exploratory. Stopping: 4 runs.",
    differs_from_paper=DIFFERS,
    caution="one path, GRPO's: elsewhere the arms' own paths differ; a gradient before gradient clipping and AdamW; "
    "stale prompts are not those of the path; AdamW's moments are empty at the first stop, so its steps are large.",
    cost="Gradients cost about 8 minutes of one core per seed, cold starts 30 s.",
    quick={"prompts_per_step": 2, "mini_batches": 2},
    seconds_per_step=SECONDS + 24,
    trainer="gradient_quality_trainer:execute",
)
