"""This process as a member of its world: `api` has `init()` and `finalize()`, `getters` what users ask.

`lifecycle` opens and closes a session, `joining` meets the other ranks, `adoption` takes a group that other code has
opened, `current` has the one mutable global. `environ` alone reads `os.environ`; `device` chooses the device of a rank.
"""
