// Filters cards, claims and configuration families by text and by what they carry. Without this script everything is shown.
(function () {
  "use strict";
  const form = document.getElementById("pb-filters");
  if (!form) return;
  const controls = [...form.elements].filter((e) => e.name);
  const items = [...document.querySelectorAll("[data-text]")].map((e) => [e, e.closest("tr") || e]);
  const none = document.getElementById("pb-none"), count = document.getElementById("pb-count");
  const value = (name) => { const found = controls.find((e) => e.name === name); return found ? found.value : ""; };

  // Where hardware and status are both asked for, one and the same verdict has to have both.
  function stands(element) {
    const pairs = (element.dataset.standings || "").split(" ").map((pair) => pair.split(":"));
    const [hardware, status] = [value("hardware"), value("status")];
    return !hardware && !status || pairs.some(([machine, word]) => (!hardware || machine === hardware) && (!status || word === status));
  }

  function matches(element) {
    const words = value("text").toLowerCase().split(/\s+/).filter(Boolean);
    const exact = controls.filter((e) => !["text", "hardware", "status"].includes(e.name) && e.value);
    return words.every((word) => element.dataset.text.includes(word)) && stands(element) && exact.every((e) => element.dataset[e.name] === e.value);
  }

  function apply() {
    const shown = items.filter(([element, item]) => { item.hidden = !matches(element); return !item.hidden; }).length;
    none.hidden = shown > 0;
    count.textContent = `${shown} of ${items.length} shown`;
  }

  // The address carries the filters: cards/index.html?text=recompile&status=confirmed
  function remember() {
    const query = new URLSearchParams(controls.filter((e) => e.value).map((e) => [e.name, e.value])).toString();
    window.history.replaceState(null, "", (query ? "?" + query : window.location.pathname) + window.location.hash);
  }

  const query = new URLSearchParams(window.location.search);
  controls.forEach((e) => { if (query.has(e.name)) e.value = query.get(e.name); });
  form.hidden = false;
  form.addEventListener("input", () => { apply(); remember(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
})();
