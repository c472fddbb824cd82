// What is wrong with the page that is open, by kind: run inside it by tests/site/test_browser.py.
() => {
  const found = {language: [], images: [], labels: [], headings: [], names: [], ids: [], contrast: [], tables: []};
  const shown = (e) => e.checkVisibility({visibilityProperty: true, contentVisibilityAuto: true});
  const where = (e) => e.outerHTML.slice(0, 120);
  const content = document.querySelector(".md-content") || document.body;

  if (!document.documentElement.lang) found.language.push("html has no lang");
  if (!document.title.trim()) found.language.push("no title");
  if (!document.querySelector('meta[name="viewport"]')) found.language.push("no viewport");

  document.querySelectorAll("img:not([alt])").forEach((e) => found.images.push(where(e)));
  content.querySelectorAll("svg").forEach((e) => {
    if (!e.closest("[aria-hidden]") && e.getAttribute("role") === "img" && !e.getAttribute("aria-label")) found.images.push(where(e));
  });

  content.querySelectorAll("input, select, textarea").forEach((e) => {
    const name = e.getAttribute("aria-label") || [...(e.labels || [])].map((l) => l.textContent.trim()).join("");
    if (!name) found.labels.push(where(e));
  });

  const headings = [...content.querySelectorAll("h1, h2, h3, h4, h5, h6")].filter(shown).map((e) => [Number(e.tagName[1]), e]);
  if (headings.filter(([level]) => level === 1).length !== 1) found.headings.push(`${headings.filter(([l]) => l === 1).length} h1`);
  headings.forEach(([level, e], i) => {
    if (i && level > headings[i - 1][0] + 1) found.headings.push(`h${headings[i - 1][0]} then ${where(e)}`);
    if (!e.textContent.trim()) found.headings.push(`empty ${where(e)}`);
  });

  document.querySelectorAll("a[href], button").forEach((e) => {
    const name = e.getAttribute("aria-label") || e.title || e.textContent.trim() || [...e.querySelectorAll("img")].map((i) => i.alt).join("");
    if (shown(e) && !name) found.names.push(where(e));
  });

  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  found.ids.push(...new Set(ids.filter((id, i) => ids.indexOf(id) !== i)));

  content.querySelectorAll("table").forEach((e) => { if (!e.querySelector("th")) found.tables.push(where(e)); });

  // Contrast by WCAG 2, of everything whose colours are our own.
  const channels = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
  const luminance = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, bottom) => { const a = top.length > 3 ? top[3] : 1; return [0, 1, 2].map((i) => top[i] * a + bottom[i] * (1 - a)); };
  const behind = (e) => {
    const layers = [];
    for (let node = e; node; node = node.parentElement) layers.push(channels(getComputedStyle(node).backgroundColor));
    return layers.reverse().reduce((below, layer) => layer.length >= 3 ? over(layer, below) : below, [255, 255, 255]);
  };
  const ours = [...document.querySelectorAll('[class*="pb-"], [class*="pb-"] *, .md-content a, .md-content td, .md-content p')];
  for (const scheme of ["default", "slate"]) {
    document.body.setAttribute("data-md-color-scheme", scheme);
    const seen = new Set();
    for (const e of ours) {
      const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
      if (!own || !shown(e) || e.closest('.headerlink')) continue;
      const style = getComputedStyle(e), svg = e instanceof SVGElement, back = behind(e);
      const front = over(channels(svg ? style.fill : style.color), back), [a, b] = [luminance(front), luminance(back)].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05), key = `${scheme} ${e.className.baseVal ?? e.className} ${ratio.toFixed(2)}`;
      if (ratio < 4.5 && !seen.has(key)) found.contrast.push(`${key}: ${where(e)}`);
      seen.add(key);
    }
  }
  return found;
}
