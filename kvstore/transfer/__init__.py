"""KV transfer between workers: a prompt's KV from prefill to decode, and prefixes that any worker pulls.

    endpoint.KvEndpoint           a worker's KV transfer: sender, receiver, prefix_pull
      sender.KvSender               receiver.KvReceiver
        connection/
          outgoing  <--- gRPC --->    incoming, reservations   one control stream per two ranks (control_stream)
        protocol/
          send_state                  receive_state            pure: offers, and ownership of the blocks
        pipeline/
          thread, send_loop           thread, receive_loop     the thread that owns one end of a transport
        copy/, transport/
          copy -> slot -- transport --> slot -> copy           IPC, NCCL, shared memory or TCP

`protocol` is pure and the same on both sides: the heads that ranks exchange and the bytes of each chunk
(`plan`), the 64 bytes before each message (`chunk_header`), and the two state machines. `connection` is one rank to one
rank. `pipeline` runs on the thread that owns one end of a transport. `copy` moves bytes between cache and payload.
`transport` moves them between two processes; a new transport is one file and one row in `transport.select`. `device` is
a GPU, as far as these two need one. `testing` breaks transfers on purpose. Imports go from the top of the picture
down. This package imports nothing by itself: `transport.nccl_env` is read before torch.

A KV transfer, message by message. Lines with ~ are data; everything else is the control stream:

    router -> D   Decode             D reserves blocks and answers with a Ticket: the open call is the reservation
    router -> P   Prefill(ticket)
    P -> D        Hello, Welcome, Rendezvous ...   once per connection
    P -> D        Offer              at once, while the prompt waits
    D -> P        Grant
    P ~> D        chunks             each as soon as its layers of its tokens are computed
    P -> router   first token        at once, whatever the transport does
    P -> D        Commit             when the last chunk has left
    D -> P        CommitAck          when every chunk is verified and in place
    both          Ping               every 2 s; P's renews the leases of all its offers

A transfer that ends early ends with Nack (from D) or Abort and AbortAck (from P); a whole connection with SessionFailed
(from D), or without a message if one side is gone. Unanswered messages are sent again. A pull is the same from the
ticket on: its receiver and its sender may be workers of any role, and there is no first token.

Callbacks to an upper layer, one type per interface, declared in the lower layer:

    pipeline.driven.OnInstruction    carries out a state machine's instructions, on the event loop
                                     <- connection.outgoing, connection.reservations
    pipeline.thread.OnTransport      the transport is open, or has ended <- connection.outgoing, connection.incoming
    pipeline.thread.OpenTransport    opens the transport, in the thread that will own it <- the same
    transport.rendezvous.OnSet       sends a key of the rendezvous to the peer <- connection.control_stream

The engine has a separate progress callback: `OutgoingTransfer.on_progress`, which a prefill worker passes to it.
"""

__all__ = [
    "connection",
    "copy",
    "device",
    "endpoint",
    "local_worker",
    "pipeline",
    "prefix_pull",
    "protocol",
    "receiver",
    "sender",
    "stats",
    "testing",
    "transport",
]
