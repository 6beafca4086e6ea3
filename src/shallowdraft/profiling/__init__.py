"""Times on this machine: iterations of drafts, passes of any shape, and a model of latency fitted to them."""
