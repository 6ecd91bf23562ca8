"""What people ask and do, in both halves: plain answers, without a terminal."""
