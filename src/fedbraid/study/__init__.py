"""Many runs: compare, sweep, choose, cost."""
