"""What a run says about the paper's claims: forgetting taken apart, privacy, memory."""
