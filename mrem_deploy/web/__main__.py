"""`mrem web` (`python -m mrem_deploy.web`): a static page on which a quantized model runs in the browser."""

from __future__ import annotations

import argparse
import shlex

from mrem_deploy.base import cli
from mrem_deploy.base.units import MIB

EXAMPLES = """\
examples:
  mrem web result --out site && python -m http.server --directory site    (then open http://localhost:8000)
  mrem web result --out site --title "Reviews, 4 bits" --texts sentences.txt
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrem web",
        description="Write a folder with a page on which a quantized classifier or embedder runs in the "
        "browser. Any static file server will do; nothing that is typed leaves the browser. The two "
        "JavaScript libraries come from npm the first time.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="result folder of `mrem quantize`")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder to write; an earlier page is replaced"
    )
    parser.add_argument("--title", metavar="TEXT", help="headline of the page (default: the name of DIR)")
    parser.add_argument(
        "--texts",
        metavar="FILE",
        help="sentences to show, one in each line: examples to click on (of pairs the second follows a tab), "
        "or for an embedder the sentences to search (default: a few of our own)",
    )
    parser.add_argument(
        "--libraries",
        metavar="DIR",
        help="folder in which `npm ci` has been run already (default: the cache, else npm is called)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)

    from mrem_deploy.web.site import build_site

    site = build_site(options.folder, options.out, options.title, options.texts, options.libraries)
    print(f"page: {site.folder / 'index.html'}")
    sizes = f"{site.file_bytes / MIB:.1f} MiB; with page and libraries {site.bytes / MIB:.1f} MiB"
    print(f"model: {site.file}, {sizes}")
    print(f"serve: python -m http.server --directory {shlex.quote(str(site.folder))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
