"""Moving KV between workers: a prompt's hand-over from prefill to decode, and prefixes that any worker pulls.

    endpoint.KvEndpoint           a worker's door: sender + receiver + pulling
      sender.KvSender               receiver.KvReceiver
        connection.outgoing <- gRPC -> connection.incoming  control: KvControl.Session, one stream a pair of ranks
          protocol.send_state           protocol.receive_state   pure: what is promised, who owns the blocks
          pipeline.thread               pipeline.thread          the thread that owns the transport
            pipeline.send_loop            pipeline.receive_loop  which message comes when
            copy -> slot -- transport --> slot -> copy           NCCL, shared memory, TCP or gloo

`protocol` is pure and the same on both sides, `connection` is one rank to one rank, `pipeline` the thread that owns one
end of a transport, `copy` moves between cache and payload, `transport` bytes from A to B. `transport.nccl_env` imports
no torch.

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
