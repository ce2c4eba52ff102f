"""What the integrations with other libraries' trainers have in common.

A `HostSession` is a session whose loop belongs to a host: the host's callbacks tell it where
training is, and PyTorch's own hooks show the rest, as in a bare loop. `host_events` has what each
host gives to hooks, `host_state` what is saved with a host's checkpoints.
"""
