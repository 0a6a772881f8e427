"""The paper's experiments, each with a verdict: does its claim hold here?

`table` lists them; a module each runs, draws and judges one. `runner` runs any number
of them into a folder and `page` shows what is there. `python -m meka.lab.reproduce` is
the command without the packages that only the terminal needs.
"""
