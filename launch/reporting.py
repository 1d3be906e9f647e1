"""What a supervisor says about itself: one report of its two daemons and all of its requests."""

import os

from launch.crew import Crew
from launch.desk import Desk
from launch.parking import Parking
from protocol.messages import MAX_REPORTED, StatusReport


def report(
    crew: Crew, desk: Desk, parking: Parking, *, now: float, began: float, load_seconds: float
) -> StatusReport:
    """What runs at `now`, how, and why; `began` is the supervisor's start on the same clock."""
    placement, ready = crew.placement, crew.stage("draft") == "ready"
    totals, no_draft = desk.totals, parking.no_target or crew.no_draft
    return StatusReport(
        pid=os.getpid(),
        seconds=now - began,
        mode="speculative" if ready else "autoregressive",
        mode_reason=parking.no_target or crew.doubt if ready else no_draft,
        transport=desk.transport,
        transport_reason=no_draft if placement is None else placement.reason,
        target=parking.status("target"),
        draft=parking.status("draft"),
        target_facts=crew.target_hello,
        draft_facts=crew.draft_hello,
        running=desk.running,
        waiting=desk.waiting,
        finished=desk.finished,
        refused=desk.refused,
        num_stale_replies=desk.num_stale_replies
        + totals.num_stale_replies
        + crew.num_stale_replies,
        num_draft_restarts=crew.restarts["draft"],
        num_target_restarts=crew.restarts["target"],
        load_seconds=load_seconds,
        completion_tokens=totals.completion_tokens,
        num_rounds=totals.num_rounds,
        num_drafts=totals.num_drafts,
        num_draft_tokens=totals.num_draft_tokens,
        num_accepted_tokens=totals.num_accepted_tokens,
        moved_bytes=totals.moved_bytes,
        requests=tuple(request.status(now) for request in desk.requests[:MAX_REPORTED]),
    )
