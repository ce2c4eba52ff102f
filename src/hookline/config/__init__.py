"""Configuration objects, the names of hooks, and the registry that creates hooks by name.

`trainer_config` has the configuration of a trainer, `hook_names` finds the class of a name,
`hook_items` reads the hooks of a configuration, `registry` is the `HookRegistry`.
"""
