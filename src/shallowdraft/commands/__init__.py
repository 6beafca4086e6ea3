"""One file a verb: its options and run(). Only here is anything printed."""
