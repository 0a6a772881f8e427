"""Seeing a run train: one page of panels, as a file or live, and a terminal view.

::

    follow.py    reads what was appended to a run's files, and nothing twice
    series.py    the curves of the panels, from what was recorded
    thin.py      few points that keep every spike
    rules.py     where each step-size rule would have put a step
    story.py     what the numbers say, in words, and what to do about it
    panels.py    the panels: what each shows and what is healthy
    view.py      a run as the page wants it
    page.py      the page: page.html, page.css, page.js around empty figures
    server.py    the page on a local port, following runs
    terminal.py  the same runs in a terminal
"""
