"""Judges for `router.moderation`, which do what the id of a request asks of them."""

from __future__ import annotations

import time

from router.request.moderation import AnswerSoFar


def judge(answer: AnswerSoFar) -> bool:
    """`veto-N-...`: an answer of N tokens or more has to end; `second-N-...`: only a request's second one;
    `raise-...`, `hang-...`: the judge does just that.
    """
    what, _, rest = answer.request_id.partition("-")
    if what == "raise":
        raise ValueError("the judge has no opinion")
    if what == "hang":
        time.sleep(3600)
    is_meant = what == "veto" or (what == "second" and answer.choice_index == 1)
    return not is_meant or answer.num_tokens < int(rest.partition("-")[0])


NO_JUDGE = "not to be called"
