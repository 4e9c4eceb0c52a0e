"""A reward that differs between the responses of any model: as verl's function, and as a task of ours."""

from moe_rl.tasks.running_sums import RunningSums


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


class Digits(RunningSums):
    """Sums, whatever they are rewarded for."""

    def reward(self, prompt, completion):
        return compute_score("", completion, "")
