"""What this host can do for kvxfer, and why not: facts gathered by probes, judged by pure functions.

`probe_*` modules look at the host and change nothing; `judge_*` modules turn what they saw into findings and never look
at anything, so every finding can be tested with made-up facts. `examine` puts them together, `report` shows the result.
"""
