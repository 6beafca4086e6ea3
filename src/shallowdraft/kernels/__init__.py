"""Fast code beside its slow reference: C for a CPU. Each kernel says which PyTorch code it stands in for."""
