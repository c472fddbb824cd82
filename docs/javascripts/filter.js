// Filters the list of cards by symptom text, hardware and status. Without this script every card is shown.
(function () {
  "use strict";
  var form = document.getElementById("pb-filters");
  if (!form) return;
  var text = document.getElementById("pb-text");
  var hardware = document.getElementById("pb-hardware");
  var status = document.getElementById("pb-status");
  var none = document.getElementById("pb-none");
  var cards = Array.prototype.slice.call(document.querySelectorAll(".pb-card"));

  function has(card, name, wanted) {
    return !wanted || card.getAttribute("data-" + name).split(" ").indexOf(wanted) >= 0;
  }

  function apply() {
    var words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    var shown = 0;
    cards.forEach(function (card) {
      var content = card.getAttribute("data-text");
      var match = has(card, "hardware", hardware.value) && has(card, "status", status.value) &&
        words.every(function (word) { return content.indexOf(word) >= 0; });
      card.hidden = !match;
      shown += match ? 1 : 0;
    });
    none.hidden = shown > 0;
  }

  // A link can carry the filters: cards/index.html?text=recompile&status=confirmed
  var query = new URLSearchParams(window.location.search);
  [["text", text], ["hardware", hardware], ["status", status]].forEach(function (pair) {
    if (query.has(pair[0])) pair[1].value = query.get(pair[0]);
  });
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  apply();
})();
