"use strict";
(function () {
  var root = document.documentElement;
  root.classList.add("scripted");

  function each(selector, action) {
    Array.prototype.forEach.call(document.querySelectorAll(selector), action);
  }

  // Colors. A file has no storage that is sure to be there, so the choice lasts as long as the page.
  each('input[name="theme"]', function (input) {
    input.addEventListener("change", function () {
      if (input.value === "auto") root.removeAttribute("data-theme");
      else root.setAttribute("data-theme", input.value);
    });
  });

  // Copying.
  each("button.copy", function (button) {
    var text = button.parentElement.querySelector("pre").textContent;
    var name = button.firstChild.nodeValue;
    function say(word) {
      button.firstChild.nodeValue = word;
      setTimeout(function () { button.firstChild.nodeValue = name; }, 1500);
    }
    function byHand() {
      var range = document.createRange();
      range.selectNodeContents(button.parentElement.querySelector("pre"));
      var selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      say(document.execCommand("copy") ? "Copied" : "Press Ctrl+C");
    }
    button.addEventListener("click", function () {
      if (navigator.clipboard && window.isSecureContext) {
        navigator.clipboard.writeText(text).then(function () { say("Copied"); }, byHand);
      } else byHand();
    });
  });

  // Filters: a row is shown while each of its values is.
  var form = document.querySelector("form.filters");
  function filter() {
    var off = [];
    each("form.filters input", function (input) {
      if (!input.checked) off.push(input.dataset.axis + "\0" + input.value);
    });
    var shown = 0;
    each("tr[data-axes]", function (row) {
      var axes = JSON.parse(row.dataset.axes);
      row.hidden = axes.some(function (axis) { return off.indexOf(axis[0] + "\0" + axis[1]) >= 0; });
    });
    each("[data-filtered]", function (part) {
      part.hidden = !part.querySelector("tr[data-axes]:not([hidden])");
      if (!part.hidden) shown += 1;
    });
    each(".none", function (note) { note.hidden = shown > 0; });
  }
  if (form) {
    form.addEventListener("change", filter);
    form.addEventListener("reset", function () { setTimeout(filter, 0); });
    form.addEventListener("submit", function (event) { event.preventDefault(); });
  }

  // The map: any two axes.
  var cells = document.getElementById("cells");
  var table = document.getElementById("heat");
  var data = cells && JSON.parse(cells.textContent);
  function made(name, text) {
    var element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  function percent(part) {
    var hundred = part * 100;
    return (Math.abs(hundred) < 0.95 ? hundred.toFixed(1) : hundred.toFixed(0)) + " %";
  }
  function field(found, programs) {
    var box = made("td");
    if (!found.length) {
      box.className = "empty";
      box.appendChild(made("span", "–")).setAttribute("aria-label", "not measured");
      return box;
    }
    var sum = 0;
    found.forEach(function (cell) { sum += Math.log(programs ? cell.p : cell.o); });
    var part = Math.exp(sum / found.length);
    box.style.setProperty("--v", part.toFixed(3));
    box.appendChild(made("b", percent(part)));
    if (found.length === 1) box.appendChild(made("small", found[0].t));
    return box;
  }
  function chosen(which) {
    var name = document.querySelector('select[data-map="' + which + '"]').value;
    return data.axes.findIndex(function (axis) { return axis.name === name; });
  }
  function draw() {
    var down = chosen("rows"), across = chosen("columns");
    // Other programs are shown where an axis tells them apart.
    var programs = data.axes[down].p || data.axes[across].p;
    var body = made("tbody"), head = made("thead"), line = made("tr");
    table.caption.textContent = data.axes[down].title + " against " + data.axes[across].title;
    line.appendChild(made("td"));
    data.axes[across].values.forEach(function (value) {
      line.appendChild(made("th", value)).scope = "col";
    });
    head.appendChild(line);
    data.axes[down].values.forEach(function (row) {
      var line = made("tr");
      line.appendChild(made("th", row)).scope = "row";
      data.axes[across].values.forEach(function (column) {
        line.appendChild(field(data.cells.filter(function (cell) {
          return cell.v[down] === row && cell.v[across] === column && (programs || cell.o !== null);
        }), programs));
      });
      body.appendChild(line);
    });
    table.replaceChild(head, table.tHead);
    table.replaceChild(body, table.tBodies[0]);
  }
  if (data && table) each("select[data-map]", function (select) {
    select.addEventListener("change", draw);
  });

  // On paper everything is unfolded but commands and samples.
  var opened = [];
  addEventListener("beforeprint", function () {
    each("section:not(#commands):not(#samples) details:not([open])", function (details) {
      details.open = true;
      opened.push(details);
    });
  });
  addEventListener("afterprint", function () {
    opened.forEach(function (details) { details.open = false; });
    opened = [];
  });
})();
