// On a phone, a page that would be many screens tall: of a long table some rows and a button for more, then sections folded to their headings. A place that is linked to is open.
// Without this script, and on wider screens, everything is shown.
(function () {
  "use strict";
  const ROWS = 10, SCREENS = 10;
  const article = document.querySelector("article");
  if (!article || !window.matchMedia("(max-width: 45em)").matches) return;
  const tall = () => document.documentElement.scrollHeight > SCREENS * window.innerHeight;
  if (!tall()) return;

  // Long lists of alike things: rows of a table, cards of the index.
  for (const parent of article.querySelectorAll("tbody, .pb-cards")) {
    const rows = () => [...parent.children].filter((row) => !row.hidden);
    if (rows().length <= ROWS) continue;
    let limit = ROWS;
    const more = Object.assign(document.createElement("button"), {type: "button", className: "md-button pb-more"});
    const apply = () => {
      const all = rows();
      all.forEach((row, i) => row.classList.toggle("pb-later", i >= limit));
      more.hidden = all.length <= limit;
      more.textContent = `${Math.min(limit, all.length)} of ${all.length} shown; show more`;
    };
    more.addEventListener("click", () => { limit += 2 * ROWS; apply(); });
    (parent.closest("table") || parent).after(more);
    document.getElementById("pb-filters")?.addEventListener("input", () => { limit = ROWS; apply(); });
    parent.playbookShow = () => { limit = Infinity; apply(); };
    apply();
  }

  const level = (node) => /^H[1-6]$/.test(node.tagName) ? Number(node.tagName[1]) : 0;
  function below(heading) {
    const nodes = [];
    for (let node = heading.nextElementSibling; node && !(level(node) && level(node) <= level(heading)); node = node.nextElementSibling) nodes.push(node);
    return nodes;
  }

  function fold(headings) {
    for (const heading of headings) {
      const nodes = below(heading);
      if (!nodes.length || nodes.some((n) => n.id === "pb-filters")) continue;
      const button = Object.assign(document.createElement("button"), {type: "button", className: "pb-fold"});
      button.setAttribute("aria-label", `Show or hide: ${heading.textContent.replace("¶", "").trim()}`);
      heading.playbookOpen = (open) => { nodes.forEach((n) => n.classList.toggle("pb-folded", !open)); button.setAttribute("aria-expanded", String(open)); };
      button.addEventListener("click", () => heading.playbookOpen(button.getAttribute("aria-expanded") !== "true"));
      heading.append(button);
      heading.playbookOpen(false);
    }
  }
  for (const tag of ["h3", "h2"]) if (tall()) fold(article.querySelectorAll(tag));

  // What the address names is shown, whatever it lies in.
  function reveal() {
    const target = window.location.hash && document.getElementById(decodeURIComponent(window.location.hash.slice(1)));
    if (!target) return;
    for (const heading of article.querySelectorAll("h2, h3")) if (heading.playbookOpen && (heading === target || below(heading).some((n) => n.contains(target)))) heading.playbookOpen(true);
    const list = target.closest("tbody, .pb-cards");
    if (list && list.playbookShow) list.playbookShow();
    target.scrollIntoView();
  }
  window.addEventListener("hashchange", reveal);
  reveal();
})();
