"""`meka scorecard`: every optimizer at one setting for all workloads, scored.

`plan` says what runs, `runner` and `worker` train it, `steptime` measures what a step
costs, `records` keeps it all in one small file, `scores` and `claims` sum it up, and
`page` and `pictures` show it.
"""
