"""Moving KV between workers: a prompt's hand-over from prefill to decode, and prefixes that any worker pulls.

    endpoint.KvEndpoint           a worker's door: sender + receiver + pulling
      sender.KvSender               receiver.KvReceiver
        pair.Pair  <--- gRPC --->     session.Session      control: KvControl.Session, one stream a pair of ranks
          offers.Offers                 ledger.Ledger      pure: what is promised, who owns the blocks
          lane.Lane                     lane.Lane          the thread that owns the link
            outflow.Outflow               inflow.Inflow    which message comes when
            rows -> slot ---- link ----> slot -> rows      NCCL, shared memory, TCP or gloo

Pure, and the same on both sides: `layout` (who exchanges which heads), `plan` (which bytes in which chunk), `header`.
The bytes: `rows` (between cache and payload), `checksum`, `slots` (staging), `torch_link` (gloo and NCCL; the one file
that uses torch.distributed) with `device_traffic` (whose turn it is on a GPU), `shm_link`, `tcp_link`, `links` (which
kind fits), `faulty_link` and `faults` (for tests). `nccl_env` imports no torch.

A hand-over, message by message. Lines with ~ are data; everything else is the control session:

    router -> D   Decode             D reserves blocks and answers with a Ticket: the open call is the reservation
    router -> P   Prefill(ticket)
    P -> D        Hello, Welcome, Rendezvous ...   once a pair
    P -> D        Offer              at once, while the prompt waits
    D -> P        Grant
    P ~> D        chunks             each as soon as its layers of its tokens are computed
    P -> router   first token        at once, whatever the link does
    P -> D        Commit             when the last chunk has left
    D -> P        CommitAck          when every chunk is verified and in place
    both          Ping               every 2 s; P's renews the leases of all that it has offered

What ends early ends with Nack (from D) or Abort and AbortAck (from P); a whole session with SessionFailed (from D), or
without a word where one side is gone. What is not answered is said again. A pull is the same from the ticket on: its
receiver and its sender may be workers of any role, and there is no first token.
"""
