"""The rules for transports, as data. They come from ``Transport``, ``Port`` and ``Inlet`` of the contract."""

from __future__ import annotations

from .rules import Rule

__all__ = [
    "ABORT_IS_IDEMPOTENT", "ABORT_WAKES", "BOUNDED", "BUCKET_IS_VALID", "CLOSED_PORT_IS_QUIET", "COMPLETE",
    "CONTENT", "DECLARES", "DOUBLE_ACK", "EARLY_ACK", "ENDS_WELL", "FACTS_IN_ORDER", "INLET_CLOSES",
    "LOSS_BY_NAME", "NEXT_ROUND", "NOTHING_LEFT", "NO_TENSOR_KEPT", "OLD_WEIGHTS", "RECEIPT_UNCHANGED",
    "SOURCE_UNTOUCHED", "STALE_ACK", "STALE_TICKET", "SURVIVES_LOSS", "TELLS_OR_RAISES", "TRANSPORT_RULES",
]  # fmt: skip

DECLARES = Rule(
    "declares",
    "A transport has a name and Capabilities that never change, and its tickets carry that name and plain "
    "values.",
    "Return a constant str and a constant Capabilities, and put only str, int, float, bool and None into a"
    " ticket.",
)
FACTS_IN_ORDER = Rule(
    "facts-in-order",
    "broadcast fires bucket_sent once for each bucket, in order, then all_sent as the last thing; acked "
    "belongs to "
    "collect.",
    "Fire each fact once, when it is true, through the port of the phase it belongs to.",
)
CONTENT = Rule(
    "content",
    "Every participant gets the bytes of every bucket as the plan lays them out, bit for bit.",
    "Pack with transports.packing.pack, send the whole flat buffer, and hand it out with the same number "
    "of bytes.",
)
COMPLETE = Rule(
    "complete",
    "A receipt says how many tensors and bytes arrived; a round with less than the plan is no success.",
    "Send every bucket to every participant, the empty ones too, and hand on only the receipts of the "
    "engines.",
)
EARLY_ACK = Rule(
    "early-ack",
    "acked is fired when every rank of the engine handed over the receipt that it made after it let go of "
    "the buffer.",
    "Fire acked with the result of the future that link.receive gave, and never before that is done.",
)
DOUBLE_ACK = Rule(
    "double-ack",
    "Each engine is acked at most once a round.",
    "Remember which engines were acked.",
)
STALE_ACK = Rule(
    "stale-ack",
    "A receipt proves the round, epoch and incarnation that it names, and nothing else.",
    "Keep no receipt, future or connection from one round to the next.",
)
RECEIPT_UNCHANGED = Rule(
    "receipt-unchanged",
    "A receipt travels unchanged; only the round judges it.",
    "Hand on the very receipts that link.receive gave, good or bad.",
)
TELLS_OR_RAISES = Rule(
    "tells-or-raises",
    "A phase that is not over has told everything when it returns; a failure is an exception or a loss, "
    "never a value.",
    "Raise TransportError, or fire lost for the engine; return None, and only when all was told or the "
    "port is closed.",
)
ENDS_WELL = Rule(
    "ends-well",
    "clean, abort and close do not raise: there is nobody left to hear it.",
    "Close what there is, whatever state it is in, and ignore what was closed or is dead already.",
)
LOSS_BY_NAME = Rule(
    "loss-by-name",
    "An engine whose receive fails is lost by its own name and with its own error, and nobody else is.",
    "When the future of link.receive fails, fire port.lost(engine, future.exception()).",
)
SURVIVES_LOSS = Rule(
    "survives-loss",
    "A transport that declares survives_loss goes on without a participant that was lost or fenced.",
    "Stop waiting for engines that are not in port.engines any more; or declare survives_loss=False.",
)
BOUNDED = Rule(
    "bounded",
    "Every phase ends by port.limit, and soon after its port is closed.",
    "Bound each wait by port.limit, and have port.on_change wake it.",
)
ABORT_WAKES = Rule(
    "abort-wakes",
    "abort stops the round from outside, beside any other method: it wakes the sender and frees the engines.",
    "Let abort set a flag and wake every wait, the engines' too; it must not wait for the call that is "
    "stuck.",
)
ABORT_IS_IDEMPOTENT = Rule(
    "abort-idempotent",
    "abort may come twice, before open, after clean, and from several threads at once.",
    "Take the round out of the transport under a lock, and end only what was there.",
)
CLOSED_PORT_IS_QUIET = Rule(
    "closed-port",
    "A port that raises PortClosed, or is closed, means that the phase is over: the transport returns.",
    "Wrap each phase in contextlib.suppress(PortClosed), and do nothing when the port is closed already.",
)
NEXT_ROUND = Rule(
    "next-round",
    "One transport serves round after round; a round that failed leaves nothing that the next one could "
    "meet.",
    "Make all that belongs to a round in open, and drop all of it in clean and abort.",
)
BUCKET_IS_VALID = Rule(
    "bucket-valid",
    "What an inlet hands out stays as it is until the next bucket is asked for, or the context is left.",
    "Do not write into a buffer again before every engine that reads it has let go.",
)
OLD_WEIGHTS = Rule(
    "old-weights",
    "A round that failed leaves the weights of an engine that stages as they were, bit for bit.",
    "Let the inlet hand out the transfer buffer only; what an engine serves is nobody's but the engine's.",
)
SOURCE_UNTOUCHED = Rule(
    "source-untouched",
    "A transport only reads the trainer's tensors.",
    "Copy out of them, and write into buffers of your own.",
)
STALE_TICKET = Rule(
    "stale-ticket",
    "A ticket is good for the session that it was made for; later it leads nowhere, soon and with an error.",
    "Give each round keys of its own, check the session in the inlet, and remove the keys when the round "
    "ends.",
)
INLET_CLOSES = Rule(
    "inlet-closes",
    "Inlet.close wakes whoever waits in buckets, is idempotent and comes from any thread; a wait for a "
    "bucket ends "
    "by the inlet's limit.",
    "Let close set a flag and wake the reader, which raises TransportError; bound each wait by limit.",
)
NOTHING_LEFT = Rule(
    "nothing-left",
    "After rounds, good or bad, and close, there are no more descriptors, threads, processes and segments "
    "than before.",
    "Close in clean and abort what open made, join or end its threads, and unlink segments where they are "
    "made.",
)
NO_TENSOR_KEPT = Rule(
    "no-tensor-kept",
    "When a round is over, the transport holds no tensor of the trainer.",
    "Drop weights and views of them when the phase returns, from tracebacks that are kept, too.",
)

TRANSPORT_RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        DECLARES, FACTS_IN_ORDER, CONTENT, COMPLETE, EARLY_ACK, DOUBLE_ACK, STALE_ACK, RECEIPT_UNCHANGED,
        TELLS_OR_RAISES, ENDS_WELL, LOSS_BY_NAME, SURVIVES_LOSS, BOUNDED, ABORT_WAKES, ABORT_IS_IDEMPOTENT,
        CLOSED_PORT_IS_QUIET, NEXT_ROUND, BUCKET_IS_VALID, OLD_WEIGHTS, SOURCE_UNTOUCHED, STALE_TICKET,
        INLET_CLOSES, NOTHING_LEFT, NO_TENSOR_KEPT,
    )
}  # fmt: skip
"""All of them, by name."""
