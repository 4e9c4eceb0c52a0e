"""Does clipping make stale gradients noisier, and does GSPO need its length normalisation? At a fixed policy."""

from small import BASE, DIFFERS, SECONDS, grpo

from moe_rl.study import Study

study = Study(
    name="gradient_clipping",
    question="On stale mini-batches, does clipping make the gradient of token ratios noisier, and how noisy is that of "
    "the ratio of whole responses, without 1/|y|?",
    hypothesis="Clipping makes the noise of token ratios worse (GSPO, arXiv 2507.18071, section 3), and without length "
    "normalisation a few tokens move a sequence's ratio far (section 4.1).",
    arms=(grpo,),
    base=BASE.replace(steps=20),
    seeds=tuple(range(420, 428)),
    own_cold_starts=True,
    figures=("expert_change",),
    decision_rule="After 20 steps of GRPO, on the path of one more, before its eighth update: gradients on 48 "
    "mini-batches of 16 responses from the step's old policy, against the gradient of 4,096 responses from the current "
    "policy, natural routes, as in gradient_quality. Variance is relative to the squared on-policy gradient, compared "
    "as a ratio, geometric mean over seeds with 97.5 % Student t of logs; 97.5 % since there are two questions. "
    "Clipping: GRPO / the same ratios unclipped; above 1: it amplifies, reproduced; below 1: it damps, reversed. "
    "Normalisation: product unclipped / sequence unclipped, above 1: needed, reproduced; below: reversed. Else "
    "undetermined at n = 8. A variance that clipping lowers only because it shortens the gradient is no better "
    "gradient, so the cosine with the on-policy gradient is said beside it, and decides nothing. Machinery: at the "
    "first update gradients of all arms are within 1e-3 of GRPO's, or the study is void; a row whose reference is "
    "mostly noise (attenuation below .7) voids its seed. Everything else is exploratory. Stopping: 8 runs.",
    differs_from_paper=DIFFERS,
    caution="13 response tokens, where the paper has thousands: a product over more moves further; one path, GRPO's, "
    "and one rate; gradients before gradient clipping and AdamW.",
    cost="Gradients cost about a minute of one core per seed, cold starts 30 s.",
    quick={"prompts_per_step": 2, "mini_batches": 2},
    seconds_per_step=SECONDS + 4,
    trainer="gradient_clipping_trainer:execute",
)
