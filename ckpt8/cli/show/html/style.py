"""The style sheet of the report: one column on a phone, light or dark as the reader's system is."""

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b1f24;--soft:#5a636e;--line:#dfe3e8;--grid:#e9ecf0;
--weight:#2f6bd8;--moment1:#0b8a7f;--moment2:#c96a12;--update:#8a45c4;--other:#7b8591;--structure:#a9b1bb;--file:#c4cad1;
--before:#aab3bf;--alarm:#b3261e}
@media (prefers-color-scheme:dark){:root{--page:#111418;--card:#1a1e24;--ink:#e7eaee;--soft:#a0a9b4;--line:#2d333b;
--grid:#272d35;--weight:#6ea1ff;--moment1:#36c2b4;--moment2:#f2a04e;--update:#c08cf2;--other:#8d97a3;--structure:#626c78;
--file:#4b545f;--before:#59636f;--alarm:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,Roboto,sans-serif;
-webkit-text-size-adjust:100%;font-variant-numeric:tabular-nums}
main{max-width:1040px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.55rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 4px}
h3{font-size:1rem;margin:20px 0 6px}
p{margin:0 0 10px}
.soft,.note,figcaption span{color:var(--soft)}
.note{font-size:.82rem;margin:4px 0 0}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px;margin-top:16px;min-width:0}
code,.name{overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:10px;margin-top:16px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 14px;min-width:0}
.tile b{display:block;font-size:1.3rem;line-height:1.3;font-weight:650;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:.82rem}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;margin:2px 0 10px;font-size:.85rem;color:var(--soft)}
.key span{display:inline-flex;align-items:center;gap:6px}
.key svg{flex:none}
.row{display:grid;grid-template-columns:1fr auto;grid-template-areas:"name value" "bar bar";gap:1px 12px;
padding:5px 0;border-top:1px solid var(--grid);align-items:center}
.row:first-of-type{border-top:0}
.row>.name{grid-area:name;min-width:0;font-size:.9rem}
.row>.value{grid-area:value;text-align:right;font-size:.85rem;white-space:nowrap}
.row>.value small{color:var(--soft);font-size:inherit;display:block}
.row>.bar{grid-area:bar;min-width:0}
.row svg,.axis svg{display:block;width:100%;overflow:visible}
.axis{padding-top:2px}
@media (min-width:760px){.row,.axis{display:grid;grid-template-columns:minmax(120px,250px) minmax(0,1fr) 230px;
grid-template-areas:"name bar value";gap:0 14px}.axis>*{grid-area:bar}
.row>.value small{display:inline}}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:18px 16px;margin-top:10px}
figure{margin:0;min-width:0;max-width:500px}
@media (min-width:820px){.pairs{grid-template-columns:1fr 1fr}.pairs svg text{font-size:8.5px}}
figure svg{display:block;width:100%;height:auto}
figcaption{font-size:.9rem;font-weight:600}
figcaption span{font-weight:400}
svg text{fill:var(--soft);font-size:11.5px;font-family:inherit}
svg .grid{stroke:var(--grid);stroke-width:1}
svg .base{stroke:var(--soft);stroke-width:1}
svg .hit{fill:transparent}
svg .hit:hover{fill:var(--ink);fill-opacity:.08}
svg .was{fill:var(--before);fill-opacity:.75}
svg .line{fill:none;stroke-width:1.75;stroke-linejoin:round}
.weight{fill:var(--weight);stroke:var(--weight)}.moment1{fill:var(--moment1);stroke:var(--moment1)}
.moment2{fill:var(--moment2);stroke:var(--moment2)}.update{fill:var(--update);stroke:var(--update)}
.other{fill:var(--other);stroke:var(--other)}.structure{fill:var(--structure);stroke:var(--structure)}
.file{fill:var(--file);stroke:var(--file)}.total{fill:var(--soft);stroke:var(--soft)}
svg .area{fill-opacity:.16;stroke:none}
svg rect,svg .area,svg .was{stroke:none!important}
svg .faint{fill-opacity:.42}
svg .ring{fill:var(--card);stroke-width:2}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th{font-weight:600;text-align:left;color:var(--soft)}
td,th{padding:5px 8px 5px 0;border-top:1px solid var(--grid);vertical-align:top;overflow-wrap:anywhere}
tr:first-child>*{border-top:0}
th{overflow-wrap:normal}
td{text-align:right;padding-right:0}
td span{display:inline-block}
article{border-top:1px solid var(--line);padding-top:12px;margin-top:14px}
article h4{margin:0;font-size:.95rem;overflow-wrap:anywhere}
.alarm{color:var(--alarm)}
ul{margin:6px 0;padding-left:20px}
li,p,h2,h3,figcaption{overflow-wrap:anywhere}
footer{color:var(--soft);font-size:.82rem;margin-top:18px}
@media print{section,.tile{break-inside:avoid}}
"""
