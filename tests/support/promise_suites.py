"""The test files that hold Hookline's promises: what users rely on, however the code is arranged.

While the code is restructured, only import lines change in these files, and in the modules of this
folder that they import (`conformance`, `every_loop`, `loops`, `rank_training`, `killed_training`,
`old_runs` …). A test that needs another change has found a promise that is about to break.

`pytest -m promise` runs them. `mutations.toml` has mistakes that they find; `make mutations` makes
each of these mistakes in a copy of the code, and checks that.
"""

PROMISE_SUITES = (
    # The same hooks see the same in every loop.
    "test_conformance.py",
    "test_conformance_as_written.py",
    # Training that is killed and resumed ends with the same bits.
    "test_kill_and_resume.py",
    "test_resume.py",
    "test_data_position.py",
    "test_random_states.py",
    "test_bare_loop_checkpoints.py",
    "test_bare_loop_optimizers.py",
    "test_write_faults.py",
    # Random training runs resume exactly.
    "test_random_trainings.py",
    # Several processes decide, train and save together.
    "test_ranks.py",
    "test_rank_differences.py",
    "test_strategies.py",
    "test_bare_loop_ranks.py",
    "test_sharded_numbers.py",
    "test_sharded_checkpoints.py",
    # Hostile files change nothing, and run no code.
    "test_hostile_checkpoints.py",
    "test_hostile_configs.py",
    "test_hostile_resumes.py",
    "test_hostile_runs.py",
    # Signals save, end training, and leave the handlers as they were.
    "test_signals.py",
    "test_preemption.py",
    "test_bare_loop_end.py",
    # Hooks in the loops of other libraries.
    "test_transformers.py",
    "test_lightning.py",
    "test_ignite.py",
    "test_accelerate_strategy.py",
    "test_accelerate.py",
    "test_transformers_edges.py",
    "test_integration_edges.py",
    "test_attached_suites.py",
    # Hooks in scripts that stay as they are.
    "test_attach_next.py",
    "test_run_command.py",
    # Runs that earlier versions wrote are continued.
    "test_old_runs.py",
    # What no other file holds.
    "test_promises.py",
)
