//! English words behind abbreviations, units, currencies.

/// Abbreviations with a full stop, in lower case, that mean the same wherever they stand.
pub(super) const ABBREVIATIONS: &[(&str, &str)] = &[
    ("mr", "Mister"), ("mrs", "Missus"), ("ms", "Miz"), ("prof", "Professor"), ("gen", "General"), ("col", "Colonel"),
    ("lt", "Lieutenant"), ("sgt", "Sergeant"), ("capt", "Captain"), ("cpt", "Captain"), ("maj", "Major"),
    ("cmdr", "Commander"), ("rev", "Reverend"), ("hon", "honorable"), ("gov", "Governor"), ("sen", "Senator"),
    ("rep", "Representative"), ("pres", "President"), ("supt", "Superintendent"), ("jr", "junior"), ("sr", "senior"),
    ("inc", "Incorporated"), ("co", "company"), ("corp", "corporation"), ("ltd", "limited"), ("bros", "brothers"),
    ("dept", "department"), ("univ", "university"), ("assn", "association"), ("apt", "apartment"),
    ("ave", "Avenue"), ("blvd", "Boulevard"), ("rd", "Road"), ("hwy", "Highway"), ("pkwy", "Parkway"),
    ("expy", "Expressway"), ("sq", "square"), ("mt", "Mount"), ("ft", "Fort"), ("vs", "versus"),
    ("etc", "et cetera"), ("approx", "approximately"), ("est", "established"), ("misc", "miscellaneous"),
    ("vol", "volume"), ("ed", "edition"), ("fig", "figure"), ("eq", "equation"), ("sec", "section"),
    ("ch", "chapter"), ("pp", "pages"), ("nos", "numbers"), ("ext", "extension"), ("tel", "telephone"),
    ("min", "minimum"), ("max", "maximum"), ("avg", "average"), ("temp", "temperature"), ("govt", "government"),
    ("intl", "international"), ("natl", "national"), ("incl", "including"), ("excl", "excluding"), ("ca", "circa"), ("cf", "compare"), ("viz", "namely"),
];

/// The same without a full stop, as written.
pub(super) const BARE: &[(&str, &str)] = &[
    ("Mr", "Mister"), ("Mrs", "Missus"), ("Dr", "doctor"), ("Expy", "Expressway"), ("Blvd", "Boulevard"),
    ("Hwy", "Highway"), ("Pkwy", "Parkway"), ("vs", "versus"), ("etc", "et cetera"), ("Jr", "junior"),
];

/// Letters with stops between them that are said as words.
pub(super) const DOTTED: &[(&str, &str)] = &[
    ("e.g", "for example"), ("i.e", "that is"), ("p.s", "PS"), ("ph.d", "PHD"), ("a.k.a", "also known as"),
    ("w.r.t", "with respect to"), ("q.e.d", "QED"),
];

/// Kinds of street, which make a number before them a house number.
pub(super) const STREETS: &[(&str, &str)] = &[
    ("St", "Street"), ("Street", "Street"), ("Ave", "Avenue"), ("Avenue", "Avenue"), ("Rd", "Road"), ("Road", "Road"),
    ("Blvd", "Boulevard"), ("Boulevard", "Boulevard"), ("Dr", "Drive"), ("Drive", "Drive"), ("Ln", "Lane"),
    ("Lane", "Lane"), ("Ct", "Court"), ("Court", "Court"), ("Pl", "Place"), ("Place", "Place"),
    ("Expy", "Expressway"), ("Expressway", "Expressway"), ("Hwy", "Highway"), ("Highway", "Highway"),
    ("Pkwy", "Parkway"), ("Parkway", "Parkway"), ("Way", "Way"), ("Sq", "Square"), ("Square", "Square"),
    ("Ter", "Terrace"), ("Terrace", "Terrace"), ("Cir", "Circle"), ("Circle", "Circle"),
];

/// The states, by the letters of their post.
pub(super) const STATES: &[(&str, &str)] = &[
    ("AL", "Alabama"), ("AK", "Alaska"), ("AZ", "Arizona"), ("AR", "Arkansas"), ("CA", "California"),
    ("CO", "Colorado"), ("CT", "Connecticut"), ("DE", "Delaware"), ("DC", "DC"), ("FL", "Florida"),
    ("GA", "Georgia"), ("HI", "Hawaii"), ("ID", "Idaho"), ("IL", "Illinois"), ("IN", "Indiana"), ("IA", "Iowa"),
    ("KS", "Kansas"), ("KY", "Kentucky"), ("LA", "Louisiana"), ("ME", "Maine"), ("MD", "Maryland"),
    ("MA", "Massachusetts"), ("MI", "Michigan"), ("MN", "Minnesota"), ("MS", "Mississippi"), ("MO", "Missouri"),
    ("MT", "Montana"), ("NE", "Nebraska"), ("NV", "Nevada"), ("NH", "New Hampshire"), ("NJ", "New Jersey"),
    ("NM", "New Mexico"), ("NY", "New York"), ("NC", "North Carolina"), ("ND", "North Dakota"), ("OH", "Ohio"),
    ("OK", "Oklahoma"), ("OR", "Oregon"), ("PA", "Pennsylvania"), ("RI", "Rhode Island"), ("SC", "South Carolina"),
    ("SD", "South Dakota"), ("TN", "Tennessee"), ("TX", "Texas"), ("UT", "Utah"), ("VT", "Vermont"),
    ("VA", "Virginia"), ("WA", "Washington"), ("WV", "West Virginia"), ("WI", "Wisconsin"), ("WY", "Wyoming"),
];

/// The months, and how they are shortened.
pub(super) const MONTHS: [(&str, &str); 12] = [
    ("january", "jan"), ("february", "feb"), ("march", "mar"), ("april", "apr"), ("may", "may"), ("june", "jun"),
    ("july", "jul"), ("august", "aug"), ("september", "sep"), ("october", "oct"), ("november", "nov"),
    ("december", "dec"),
];

/// The days of the week by how they are shortened.
pub(super) const DAYS: &[(&str, &str)] = &[
    ("mon", "Monday"), ("tue", "Tuesday"), ("tues", "Tuesday"), ("wed", "Wednesday"), ("thu", "Thursday"),
    ("thur", "Thursday"), ("thurs", "Thursday"), ("fri", "Friday"), ("sat", "Saturday"), ("sun", "Sunday"),
];

/// Units by their sign: one, several.
pub(super) const UNITS: &[(&str, &str, &str)] = &[
    ("kg", "kilogram", "kilograms"), ("kgs", "kilogram", "kilograms"), ("Kg", "kilogram", "kilograms"),
    ("KG", "kilogram", "kilograms"), ("mos", "month", "months"), ("mbps", "megabit per second", "megabits per second"),
    ("gbps", "gigabit per second", "gigabits per second"), ("g", "gram", "grams"), ("mg", "milligram", "milligrams"),
    ("µg", "microgram", "micrograms"), ("μg", "microgram", "micrograms"), ("t", "ton", "tons"),
    ("lb", "pound", "pounds"), ("lbs", "pound", "pounds"), ("oz", "ounce", "ounces"),
    ("km", "kilometer", "kilometers"), ("m", "meter", "meters"), ("dm", "decimeter", "decimeters"),
    ("cm", "centimeter", "centimeters"), ("mm", "millimeter", "millimeters"), ("µm", "micrometer", "micrometers"),
    ("μm", "micrometer", "micrometers"), ("um", "micrometer", "micrometers"), ("nm", "nanometer", "nanometers"),
    ("mi", "mile", "miles"), ("yd", "yard", "yards"), ("ft", "foot", "feet"),
    ("l", "liter", "liters"), ("L", "liter", "liters"), ("ml", "milliliter", "milliliters"),
    ("mL", "milliliter", "milliliters"), ("cl", "centiliter", "centiliters"), ("dl", "deciliter", "deciliters"),
    ("gal", "gallon", "gallons"), ("pt", "pint", "pints"), ("tbsp", "tablespoon", "tablespoons"),
    ("tsp", "teaspoon", "teaspoons"), ("ha", "hectare", "hectares"), ("ac", "acre", "acres"),
    ("h", "hour", "hours"), ("hr", "hour", "hours"), ("hrs", "hour", "hours"), ("min", "minute", "minutes"),
    ("mins", "minute", "minutes"), ("s", "second", "seconds"), ("sec", "second", "seconds"),
    ("secs", "second", "seconds"), ("ms", "millisecond", "milliseconds"), ("µs", "microsecond", "microseconds"),
    ("μs", "microsecond", "microseconds"), ("us", "microsecond", "microseconds"), ("ns", "nanosecond", "nanoseconds"),
    ("wk", "week", "weeks"), ("wks", "week", "weeks"), ("yr", "year", "years"), ("yrs", "year", "years"),
    ("mo", "month", "months"),
    ("mph", "mile per hour", "miles per hour"), ("kph", "kilometer per hour", "kilometers per hour"),
    ("kmh", "kilometer per hour", "kilometers per hour"), ("mpg", "mile per gallon", "miles per gallon"),
    ("rpm", "revolution per minute", "revolutions per minute"), ("bpm", "beat per minute", "beats per minute"),
    ("fps", "frame per second", "frames per second"), ("kn", "knot", "knots"),
    ("Hz", "hertz", "hertz"), ("kHz", "kilohertz", "kilohertz"), ("MHz", "megahertz", "megahertz"),
    ("GHz", "gigahertz", "gigahertz"), ("THz", "terahertz", "terahertz"),
    ("bit", "bit", "bits"), ("kbps", "kilobit per second", "kilobits per second"),
    ("Mbps", "megabit per second", "megabits per second"), ("Gbps", "gigabit per second", "gigabits per second"),
    ("kB", "kilobyte", "kilobytes"), ("KB", "kilobyte", "kilobytes"),
    ("MB", "megabyte", "megabytes"), ("GB", "gigabyte", "gigabytes"), ("TB", "terabyte", "terabytes"),
    ("PB", "petabyte", "petabytes"), ("KiB", "kibibyte", "kibibytes"), ("MiB", "mebibyte", "mebibytes"),
    ("GiB", "gibibyte", "gibibytes"), ("TiB", "tebibyte", "tebibytes"), ("MP", "megapixel", "megapixels"),
    ("px", "pixel", "pixels"), ("dpi", "dot per inch", "dots per inch"),
    ("V", "volt", "volts"), ("mV", "millivolt", "millivolts"), ("kV", "kilovolt", "kilovolts"),
    ("mA", "milliampere", "milliamperes"), ("mAh", "milliampere hour", "milliampere hours"),
    ("W", "watt", "watts"), ("mW", "milliwatt", "milliwatts"), ("kW", "kilowatt", "kilowatts"),
    ("MW", "megawatt", "megawatts"), ("GW", "gigawatt", "gigawatts"), ("kWh", "kilowatt hour", "kilowatt hours"),
    ("MWh", "megawatt hour", "megawatt hours"), ("hp", "horsepower", "horsepower"), ("Ω", "ohm", "ohms"),
    ("J", "joule", "joules"), ("kJ", "kilojoule", "kilojoules"), ("cal", "calorie", "calories"),
    ("kcal", "kilocalorie", "kilocalories"), ("N", "newton", "newtons"), ("Nm", "newton meter", "newton meters"),
    ("Pa", "pascal", "pascals"), ("hPa", "hectopascal", "hectopascals"), ("kPa", "kilopascal", "kilopascals"),
    ("bar", "bar", "bars"), ("psi", "pound per square inch", "pounds per square inch"),
    ("dB", "decibel", "decibels"), ("lm", "lumen", "lumens"), ("lx", "lux", "lux"), ("mol", "mole", "moles"),
    ("ppm", "part per million", "parts per million"), ("rad", "radian", "radians"), ("K", "kelvin", "kelvins"),
    ("°C", "degree Celsius", "degrees Celsius"), ("℃", "degree Celsius", "degrees Celsius"),
    ("°F", "degree Fahrenheit", "degrees Fahrenheit"), ("℉", "degree Fahrenheit", "degrees Fahrenheit"),
    ("°", "degree", "degrees"), ("%", "percent", "percent"), ("‰", "per mille", "per mille"),
    ("sq ft", "square foot", "square feet"), ("sq mi", "square mile", "square miles"),
    ("sq m", "square meter", "square meters"), ("sq km", "square kilometer", "square kilometers"),
    ("in", "inch", "inches"), ("fl oz", "fluid ounce", "fluid ounces"), ("cc", "cubic centimeter", "cubic centimeters"),
];

/// A currency.
pub(super) struct Currency {
    /// Its signs and codes.
    pub(super) signs: &'static [&'static str],
    /// One of it, several of it.
    pub(super) names: (&'static str, &'static str),
    /// The hundredth part, one and several; empty where there is none.
    pub(super) parts: (&'static str, &'static str),
}

const fn currency(
    signs: &'static [&'static str],
    one: &'static str,
    many: &'static str,
    part: &'static str,
    parts: &'static str,
) -> Currency {
    Currency { signs, names: (one, many), parts: (part, parts) }
}

/// Longer signs first.
pub(super) const CURRENCIES: &[Currency] = &[
    currency(&["US$", "USD", "$"], "dollar", "dollars", "cent", "cents"),
    currency(&["A$", "AU$", "AUD"], "Australian dollar", "Australian dollars", "cent", "cents"),
    currency(&["C$", "CA$", "CAD"], "Canadian dollar", "Canadian dollars", "cent", "cents"),
    currency(&["HK$", "HKD"], "Hong Kong dollar", "Hong Kong dollars", "cent", "cents"),
    currency(&["NZ$", "NZD"], "New Zealand dollar", "New Zealand dollars", "cent", "cents"),
    currency(&["S$", "SGD"], "Singapore dollar", "Singapore dollars", "cent", "cents"),
    currency(&["€", "EUR"], "euro", "euros", "cent", "cents"),
    currency(&["£", "GBP"], "pound", "pounds", "penny", "pence"),
    currency(&["¥", "￥", "JPY"], "yen", "yen", "", ""),
    currency(&["CNY", "RMB"], "yuan", "yuan", "", ""),
    currency(&["AED"], "dirham", "dirhams", "fils", "fils"),
    currency(&["₹", "INR", "Rs", "Rs."], "rupee", "rupees", "paisa", "paise"),
    currency(&["₩", "KRW"], "won", "won", "", ""),
    currency(&["₽", "RUB"], "ruble", "rubles", "kopeck", "kopecks"),
    currency(&["CHF"], "Swiss franc", "Swiss francs", "", ""),
    currency(&["₿", "BTC"], "bitcoin", "bitcoins", "", ""),
    currency(&["₺", "TRY"], "lira", "lira", "", ""),
    currency(&["₪", "ILS"], "shekel", "shekels", "", ""),
];

/// Signs that are said by themselves.
pub(super) const SIGNS: &[(char, &str)] = &[
    ('&', "and"), ('%', "percent"), ('£', "pound"), ('€', "euro"), ('¥', "yen"), ('$', "dollar"), ('°', "degrees"),
    ('±', "plus or minus"), ('×', "times"), ('÷', "divided by"), ('≈', "approximately"), ('≠', "is not equal to"),
    ('≤', "is less than or equal to"), ('≥', "is greater than or equal to"), ('∞', "infinity"), ('√', "square root of"),
    ('→', "to"), ('©', "copyright"), ('§', "section"), ('¶', "paragraph"), ('∑', "sum"), ('∫', "integral"),
    ('=', "equals"), ('+', "plus"), ('@', "at"),
];

/// Greek letters by themselves, from alpha on; both cases.
pub(super) const GREEK: &[(char, &str)] = &[
    ('α', "alpha"), ('β', "beta"), ('γ', "gamma"), ('δ', "delta"), ('ε', "epsilon"), ('ζ', "zeta"), ('η', "eta"),
    ('θ', "theta"), ('ι', "iota"), ('κ', "kappa"), ('λ', "lambda"), ('μ', "mu"), ('ν', "nu"), ('ξ', "xi"),
    ('ο', "omicron"), ('π', "pi"), ('ρ', "rho"), ('σ', "sigma"), ('ς', "sigma"), ('τ', "tau"), ('υ', "upsilon"),
    ('φ', "phi"), ('χ', "chi"), ('ψ', "psi"), ('ω', "omega"),
];

/// What follows a name as a number of a ruler.
pub(super) const RULERS: &[&str] = &[
    "Henry", "Louis", "George", "Charles", "James", "Edward", "Richard", "William", "Elizabeth", "Philip", "Peter",
    "Catherine", "Nicholas", "Alexander", "Frederick", "Pope", "Pius", "Paul", "Benedict", "Leo", "Gregory",
    "Napoleon", "Wilhelm", "Ferdinand", "Francis", "Leopold", "Mary", "Ramesses", "Ptolemy", "John", "Victoria", "Harald", "Gustav",
];

/// What stands before a year.
pub(super) const DATED: &[&str] = &[
    "in", "since", "by", "from", "until", "till", "of", "year", "before", "after", "around", "circa", "to", "between",
    "during", "ad", "anno", "early", "late",
];

/// What a Roman numeral numbers.
pub(super) const NUMBERED: &[&str] = &[
    "chapter", "part", "volume", "book", "act", "scene", "section", "article", "phase", "type", "class", "level",
    "stage", "war", "appendix", "episode", "grade", "figure", "table", "title", "bowl",
];

/// What makes a number behind it a code that is read digit by digit.
pub(super) const CODES: &[&str] = &[
    "code", "pin", "order", "account", "id", "reference", "ref", "ticket", "booking", "confirmation", "tracking",
    "invoice", "password", "otp", "serial", "zip", "postcode", "passcode", "extension", "card", "ending",
];
