"""The control plane: the members of a group agree on a call, and exchange short messages.

From the call down: `call`, whose turn it is (`turns`), the members (`control`), an exchange (`channel`) through the
page of the host (`page_channel`), the pages of several hosts (`hosts_channel`) or connections alone (`socket_channel`),
what is sent (`protocol`, `calls`) and concluded (`verdict`). Between hosts the rules are in `exchange`, by the `tree`;
a `branch` is the place of one host in it, and the `board` is for what cannot wait for others. Then data may move
(`flow`). `registry` has the groups of a session, and finds deadlocks between them. `page` and `links` are the memory
and the connections below.
"""
