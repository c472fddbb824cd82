// The theme's search asks for every word of a question and for whatever begins with it, so that "a" and "of" match nearly every page.
// Here such words are taken out of the question on its way to the search's worker. Without this script the search works, and ranks worse.
(function () {
  "use strict";
  const QUERY = 2;
  const WORDS = new Set(("a an and are as at be but by can do does for from has have how i if in into is it its me my not of on or our so than that " +
    "the their them then there this to was we were what when where which while why will with").split(" "));
  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message && message.type === QUERY && typeof message.data === "string") {
      const kept = message.data.split(/\s+/).filter((word) => !WORDS.has(word.toLowerCase()));
      if (kept.join("")) message = {...message, data: kept.join(" ")};
    }
    return post.call(this, message, ...rest);
  };
})();
