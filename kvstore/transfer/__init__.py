"""The hand-over of a sequence's KV from a prefill worker to a decode worker.

    sender.KvSender -> outbound -> staging -> link ~~~> link -> staging -> inbound -> receiver.KvReceiver
         `---------------- control session (gRPC, KvControl) ----------------------------------'
    plan, header, ledger: pure, what both sides must agree on and who owns the blocks

`torch_link` is the one file with torch.distributed in it; `nccl_env` imports no torch.
"""
