"""Environments answer the model and score its responses.

    driver: rollouts/pool.py starts an EnvironmentPool for each task (environment_processes.py)
      │ one handle for each rollout worker
      ▼
    rollout worker: EnvironmentClient (rollouts/environment_client.py), the queue of its calls, deadlines, retries
      │ EnvironmentRequest: prompt, response, columns of the row (data/scores.py)
      ▼
    environment process: EnvironmentWorker (environment_worker.py), one call at a time on its main thread
      │ reset, step, act, score
      ▼
    Environment (interface.py): a class of this folder, or of the user; model-written programs run in sandbox/
      │ Turn of a conversation, or EnvironmentReturn: reward, correct, metrics
      ▼
    the rollout worker goes on with the rollout, or completes its group

An EnvironmentConfig (config/data_schema.py) says which class with which options; EnvironmentSettings is what the run
tells it; EnvironmentStatus is the answer of a process that is ready.
"""
