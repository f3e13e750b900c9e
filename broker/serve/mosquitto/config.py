"""Renders mosquitto.conf. Every line that closes a trap says which, in the file that Mosquitto reads."""

from __future__ import annotations

from pathlib import Path

from broker.contract import messages

_TEMPLATE = """\
# Rendered by actorq-broker; changes here are lost.

# One listener, by address: with none named, Mosquitto before 2.0 listens on every interface.
listener {port} {host}
set_tcp_nodelay true

# Mosquitto 2.1 cuts the connection at packets over 2 000 000 bytes; a 2048-wide policy has 4.3 MB. The older
# message_size_limit stays unset: what exceeds that is thrown away *and acknowledged*, so its sender never learns.
max_packet_size {max_packet_bytes}

# The default of 1000 drops the rest for a slow subscriber in silence (6 575 of 12 000 messages were lost). So
# bytes are what is limited, per client: that is memory, and the sender's spool covers what is dropped beyond it.
max_queued_messages 1000000
max_queued_bytes {max_queued_bytes}
# Ahead of a subscriber's acknowledgements; for one that acknowledges in groups, after a commit. 20, 100 and 400
# carry the same number of 27 KB messages to one that acknowledges at once.
max_inflight_messages 400

retain_available true
# Off on purpose. What is retained is published again on every connect, and an actor keeps its experience until the
# learner's receipt. `persistence true` alone gave back 0 of 500 messages after kill -9: it saves every 1800 s.
persistence false
# Clients of ours start with a clean session; those of others must not pile up queues for ever.
persistent_client_expiration 1d

# $SYS tells every client how many others there are; nobody here reads it.
sys_interval 0
log_dest stderr
log_type error
log_type warning
log_timestamp false
"""

_OPEN = """
# Anonymous, because only this machine can connect; every payload is signed all the same.
allow_anonymous true
connection_messages false
"""

_CLOSED = """
# Enrolled machines only, and each only at its own topics.
# The ACL is not asked at SUBSCRIBE, and nothing limits how many there are: actorq-broker counts these lines (watch.py).
log_type notice
log_type subscribe
connection_messages true
allow_anonymous false
password_file {directory}/passwords
acl_file {directory}/access

# TLS, and only for those who hold a certificate of the fleet's own authority; no other authority is known here.
tls_version tlsv1.2
cafile {directory}/authority.pem
certfile {directory}/broker.pem
keyfile {directory}/broker.pem
require_certificate true
# use_identity_as_username stays off: with it Mosquitto checks no password, so a revoked client would stay connected
# after a reload and be let in again. A revocation list would not end its connection either, and a list that is out of
# date locks everyone out.
"""


def render(host: str, port: int, *, directory: Path | None = None) -> str:
    """Returns the text of a mosquitto.conf.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        directory: Holds `passwords`, `access`, `authority.pem` and `broker.pem`; without it anyone who can connect is
            let in, without TLS.
    """
    text = _TEMPLATE.format(
        host=host,
        port=port,
        max_packet_bytes=messages.MAX_PACKET_BYTES,
        max_queued_bytes=8 * messages.MAX_PACKET_BYTES,
    )
    return text + (_OPEN if directory is None else _CLOSED.format(directory=directory))
