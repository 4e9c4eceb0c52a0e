"""A reward that differs between the responses of any model."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
