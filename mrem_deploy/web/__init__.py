"""A static page on which a quantized model runs in the browser.

`page/` is copied as it is: HTML, CSS and JavaScript modules, which read `site.json` (`settings.py`). `npm/`
pins the two libraries it runs on, `libraries.py` gets them, `site.py` puts everything into one folder.
"""

from __future__ import annotations
