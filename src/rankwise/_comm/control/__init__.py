"""The control plane: the members of a group agree on a call, and exchange short messages.

From the call down: `call`, whose turn it is (`turns`), the members (`control`), an exchange (`channel`) through the
page of the host (`page_channel`) or over connections (`socket_channel`, with the rules in `exchange`), what is sent
(`protocol`) and concluded (`verdict`). Then data may move (`flow`). `registry` has the groups of a session, and finds
deadlocks between them. `page` and `links` are the memory and the connections below. `digests` is for groups that are
too large for frames.
"""
