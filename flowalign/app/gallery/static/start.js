"use strict";
gallery.warnings();
gallery.notes();
addEventListener("hashchange", gallery.show);
gallery.show();
