"""How an exported page looks: one style sheet, light or dark as the reader's system is."""

CSS = """
:root {
  color-scheme: light dark;
  --text: #1f2430; --faint: #5b6270; --page: #fbfaf8; --box: #f1eee9; --line: #dcd7cf; --accent: #a83a0b; --link: #0f5f58;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #dfe3ec; --faint: #9aa1b2; --page: #12141b; --box: #1b1f2a; --line: #313747; --accent: #ff9d7d; --link: #8bd5ca;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 46rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--text);
  font: 1rem/1.6 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; }
header p, .figures, .target, footer { color: var(--faint); font-size: .875rem; }
article { margin-top: 2rem; }
article > h2 { font-size: .9375rem; color: var(--accent); margin: 0 0 .25rem; }
article.user > .text, article.system > .text {
  background: var(--box); border-left: 3px solid var(--accent); padding: .5rem 1rem; white-space: pre-wrap;
}
.text h1, .text h2, .text h3 { font-size: 1.1rem; }
.link, a { color: var(--link); }
.ending { color: var(--accent); }
pre { background: var(--box); padding: .75rem 1rem; overflow-x: auto; }
code, pre { font: .875rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
pre.plain { white-space: pre-wrap; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border: 1px solid var(--line); padding: .25rem .625rem; text-align: left; }
.right { text-align: right; }
.center { text-align: center; }
blockquote { margin: 1rem 0; padding-left: 1rem; border-left: 3px solid var(--line); color: var(--faint); }
details { margin: .5rem 0; }
summary { color: var(--faint); cursor: pointer; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .5rem; }
@media print { body { max-width: none; } article { break-inside: avoid-page; } }
"""
