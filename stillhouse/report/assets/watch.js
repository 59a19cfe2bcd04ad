// Only in a page that `stillhouse report --watch` serves: replaces the content when the run has written new data.
"use strict";
(() => {
  const EVERY = 2000; // milliseconds
  const live = document.querySelector(".live");
  let version = null;
  const say = (text, failed) => {
    live.textContent = text;
    live.classList.toggle("failed", failed);
  };

  const renew = (text) => {
    const page = new DOMParser().parseFromString(text, "text/html");
    const open = new Set([...document.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
    for (const part of ["header", "main"]) document.querySelector(part).replaceWith(page.querySelector(part));
    document.getElementById("data").textContent = page.getElementById("data").textContent;
    document.title = page.title;
    for (const summary of document.querySelectorAll("details > summary")) {
      if (open.has(summary.textContent)) summary.parentElement.open = true;
    }
    document.dispatchEvent(new Event("stillhouse-renewed"));
  };

  const ask = async () => {
    try {
      const answer = await fetch("/", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
      if (answer.status === 200) {
        const text = await answer.text();
        if (version !== null) renew(text);
        version = answer.headers.get("ETag");
      }
      const failed = !answer.ok && answer.status !== 304;
      say(failed ? "The report cannot be read at present: " + (await answer.text()) : "Live: this page follows the run.", failed);
    } catch {
      say("`stillhouse report --watch` has ended; this page is no longer updated.", true);
    }
    setTimeout(ask, EVERY);
  };
  ask();
})();
