"""The style of a report's page: light and dark, narrow and wide, screen and paper."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2024; --soft: #5b6570; --paper: #ffffff; --panel: #f4f6f8; --line: #d9dee4;
  --mark: #2468b4; --bytes: #4a8f7b; --dead: #b3402a; --track: #e6eaef; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e8ec; --soft: #9aa5b1; --paper: #14181c; --panel: #1d2329; --line: #333c46;
  --mark: #6ca8ec; --bytes: #74bfa7; --dead: #ec8369; --track: #2a323a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 3rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .5rem; padding-top: .9rem;
  border-top: 2px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
h1, h2, .w, .k { overflow-wrap: anywhere; }
p { margin: .3rem 0; }
a { color: var(--mark); }
.soft, figcaption, .axis, dt { color: var(--soft); font-size: .87rem; }
.advice { background: var(--panel); border-left: 4px solid var(--mark); padding: .6rem .8rem;
  margin: .8rem 0; }
dl { display: grid; grid-template-columns: repeat(3, 1fr); gap: .6rem 1rem;
  margin: .8rem 0; }
dd { margin: 0; font-size: 1.05rem; }
figure { margin: .6rem 0 1.2rem; }
.axis { display: flex; justify-content: space-between; gap: 1rem; }
.columns { display: block; width: 100%; height: 7rem; margin: .3rem 0 .1rem;
  border-bottom: 1px solid var(--soft); }
.bar { display: block; width: 100%; min-width: 4rem; height: .7rem; }
rect { fill: var(--mark); }
.bytes rect { fill: var(--bytes); }
.dead rect { fill: var(--dead); }
rect.track, .bytes rect.track, .dead rect.track { fill: var(--track); }
.grid { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; }
th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
td { border-bottom: 1px solid var(--line); }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.t { white-space: nowrap; overflow-wrap: normal; }
.w { min-width: 13rem; }
.k { min-width: 8rem; }
.b { width: 40%; vertical-align: middle; }
code { font: .87em ui-monospace, monospace; }
@media (max-width: 34rem) { body { font-size: 14px; padding: 1rem .7rem 2rem; }
  dl { grid-template-columns: 1fr 1fr; } .b { width: 30%; } th, td { padding-right: .6rem; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff;
  --panel: #f2f2f2; --line: #bbb; --mark: #2468b4; --bytes: #4a8f7b; --dead: #b3402a;
  --track: #e6e6e6; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  a { color: inherit; text-decoration: none; }
  table { font-size: 7.5pt; } td, .n { white-space: normal; } .w { min-width: 9rem; }
  .t { overflow-wrap: anywhere; } th, td { padding-right: .5rem; }
  figure, tr, .advice, dl { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; } rect { print-color-adjust: exact; } }
"""
