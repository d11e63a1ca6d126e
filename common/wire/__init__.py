"""Links between processes: `link` is what actors see, `zmq_link` and `memory_link` carry it, `session` is the
handshake and credit that both share, `codec` the bytes."""
