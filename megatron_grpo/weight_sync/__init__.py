"""Refits: moving the policy's weights into the workers of engines, one version at a time.

    driver: transport.py (attempts), transfer_modes.py (links, memory, files), transfer_plan.py (who sends what to whom)
       │ plan, once                  │ begin version N                  │ commit, once all have verified; canary; serve
       ▼                             ▼                                  ▼
    ranks of the policy  ── messages of pieces (links.py) ──▶  workers of engines
    shard_sender.py         NCCL or gloo, device memory,       shard_receiver.py: checksum and version of each message
    reads its shard         or files                           model_writer.py: pieces into the boxes of parameters

Words for parts of tensors:

- box: a part of a parameter of an engine's rank, with the part of the Hugging Face tensor that fills it (boxes.py);
- box layout: which elements of the tensor lie where in the box, and what is computed of them on the way;
- section: a part of a tensor that tensor parallelism splits on its own, such as the query in a joint matrix
  (models/weight_map.py);
- piece: what a rank of the policy sends of a tensor for a box of an engine's rank (pieces.py);
- message: pieces of one sender for one receiver, with version and checksum behind them;
- bucket: the most bytes that a message, or a file being written, has.
"""
