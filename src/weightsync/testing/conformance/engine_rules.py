"""The rules for engine adapters, as data. They come from ``EngineLink`` and the table of an engine."""

from __future__ import annotations

from .rules import Rule

__all__ = [
    "ABORT_ANSWERS", "ABORT_ENDS_RECEPTION", "ANSWERS_AT_ONCE", "BUSY_IS_NOT_DEAD", "CLOSE_IS_THE_LINKS",
    "COMMIT_NEEDS_PROOF", "DRAIN_IS_BOUNDED", "ENGINE_RULES", "ERRORS_AS_RAISED", "GONE_AT_ONCE", "HELLO",
    "INCARNATION", "LINK_LEAVES_NOTHING", "NEWER_WINS", "OPEN_PAUSES", "OWN_LIMIT", "PLAN_IS_CHECKED",
    "RECEIPT_IS_PROOF", "REVERTS", "SAID_TWICE", "SERVES_NEW", "STALE_IS_REFUSED",
]  # fmt: skip

ANSWERS_AT_ONCE = Rule(
    "answers-at-once",
    "Every word gives a future at once, whatever the engine is doing; the answer comes later.",
    "Say the word on a thread or over a connection of its own, and return the future before it is carried "
    "out.",
)
HELLO = Rule(
    "hello",
    "hello says what the engine is: its id, this life of it, its ranks, whether it stages, its state and "
    "version.",
    "Answer from the engine itself, each time anew; make a new incarnation whenever it starts.",
)
OPEN_PAUSES = Rule(
    "open-pauses",
    "From open until resume, or until the session ends with whole weights, no generation is admitted; then"
    " it is.",
    "Close the gate in open and wait until it is empty; open it again by the engine's state alone.",
)
DRAIN_IS_BOUNDED = Rule(
    "drain-bounded",
    "A generation that does not end fails open with EngineSilent by its limit, and generation goes on.",
    "Bound the wait for the gate by limit, and open the gate again before you raise.",
)
SERVES_NEW = Rule(
    "serves-new",
    "After commit and resume the engine samples with the bytes that were sent, and says their version.",
    "Apply every bucket by the plan, take the new weights over in commit, and only then say so.",
)
RECEIPT_IS_PROOF = Rule(
    "receipt-is-proof",
    "receive gives a receipt of every rank when all buckets are applied and the transfer buffer is let go "
    "of, with "
    "the digest of what is really there, of the part that is asked for; otherwise it fails.",
    "Leave the inlet's context before the receipt is made, and let only EngineMachine.receipt make it.",
)
COMMIT_NEEDS_PROOF = Rule(
    "commit-needs-proof",
    "commit is refused before the receipt was made, and resume before the commit.",
    "Ask the engine's machine before anything is done.",
)
SAID_TWICE = Rule(
    "said-twice",
    "commit, abort and resume may be said twice: the second one changes nothing and gives the same answer.",
    "Let the engine's machine decide, which knows what was said before.",
)
ABORT_ANSWERS = Rule(
    "abort-answers",
    "abort says what the engine is: reverted with whole old weights, committed after a commit, torn after "
    "a bucket "
    "that was loaded in place.",
    "Return EngineMachine.answer once nothing of the session writes any more.",
)
ABORT_ENDS_RECEPTION = Rule(
    "abort-ends-reception",
    "abort ends a reception that is stuck; its future fails soon, and abort answers soon.",
    "Carry abort out beside receive, and close the inlet in it.",
)
REVERTS = Rule(
    "reverts",
    "A session that failed leaves an engine that stages as it was, bit for bit and generating; one that "
    "loads in place "
    "is Quarantined, and does not generate until a full resend was committed.",
    "Stage beside the live weights, or say stages=False and keep the gate closed after a bucket.",
)
STALE_IS_REFUSED = Rule(
    "stale-refused",
    "Words of a session that is over, or of an older epoch, are refused with StaleSession and change "
    "nothing.",
    "Keep the highest epoch that was ended, and compare every word with it.",
)
NEWER_WINS = Rule(
    "newer-wins",
    "open or abort of a newer epoch ends an older session, also one that is stuck, and words of that are "
    "refused from then on.",
    "End the older reception in open and in abort, and wait until it writes nothing any more.",
)
INCARNATION = Rule(
    "incarnation",
    "A word that is meant for another life of the engine fails with EngineGone and changes nothing.",
    "Compare the incarnation before anything else is looked at.",
)
PLAN_IS_CHECKED = Rule(
    "plan-checked",
    "open refuses a plan that does not bring exactly what the engine holds with PlanError, and generation "
    "goes on.",
    "Check the plan against the engine's tensors before you touch the gate.",
)
ERRORS_AS_RAISED = Rule(
    "errors-as-raised",
    "What is raised in the engine is what the future raises: the same type, and the same words.",
    "Carry the exception itself over; keep a report of your own as its cause.",
)
OWN_LIMIT = Rule(
    "own-limit",
    "An engine that hears nothing for the limit of its session ends it by itself, and generates again if "
    "it is whole.",
    "Watch the limit in the engine's process, not in the link.",
)
BUSY_IS_NOT_DEAD = Rule(
    "busy-is-not-dead",
    "An engine that generates, or receives, still answers to hello, and is never EngineGone.",
    "Carry words out beside the engine's work, on threads that generation cannot take.",
)
GONE_AT_ONCE = Rule(
    "gone-at-once",
    "When an engine is dead, every future that is open and every later word fails with EngineGone, soon.",
    "Watch the engine's process or connection, and fail what is open when that ends.",
)
CLOSE_IS_THE_LINKS = Rule(
    "close-is-the-links",
    "close gives back what the link holds, may be said twice, and leaves the engine as it is.",
    "End the link's own connections and threads, and say nothing to the engine.",
)
LINK_LEAVES_NOTHING = Rule(
    "link-leaves-nothing",
    "Rounds leave no descriptor, thread, process or segment in the trainer's process.",
    "End the threads and connections of a word when it is answered, or keep a fixed number of them.",
)

ENGINE_RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        ANSWERS_AT_ONCE, HELLO, OPEN_PAUSES, DRAIN_IS_BOUNDED, SERVES_NEW, RECEIPT_IS_PROOF,
        COMMIT_NEEDS_PROOF, SAID_TWICE, ABORT_ANSWERS, ABORT_ENDS_RECEPTION, REVERTS, STALE_IS_REFUSED,
        NEWER_WINS, INCARNATION, PLAN_IS_CHECKED, ERRORS_AS_RAISED, OWN_LIMIT, BUSY_IS_NOT_DEAD,
        GONE_AT_ONCE, CLOSE_IS_THE_LINKS, LINK_LEAVES_NOTHING,
    )
}  # fmt: skip
"""All of them, by name."""
