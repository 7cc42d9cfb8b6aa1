//! What callers have spoken to them: sentences such as agents say, in several languages and lengths.

use rand::Rng;
use serde::{Deserialize, Serialize};

/// How long a text is, which decides how much speech it makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Length {
    /// A few words.
    Short,
    /// A sentence.
    Medium,
    /// Two or three sentences.
    Long,
}

impl Length {
    /// All, shortest first.
    pub const ALL: [Length; 3] = [Length::Short, Length::Medium, Length::Long];
}

/// One text of the corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text {
    /// BCP 47 language.
    pub language: &'static str,
    /// How long it is.
    pub length: Length,
    /// The words.
    pub text: &'static str,
}

/// The languages there are texts in.
pub fn languages() -> Vec<&'static str> {
    let mut all: Vec<&str> = CORPUS.iter().map(|t| t.language).collect();
    all.dedup();
    all
}

/// The texts of these languages and lengths; empty lists mean all.
pub fn select(languages: &[String], lengths: &[Length]) -> Vec<&'static Text> {
    CORPUS
        .iter()
        .filter(|t| languages.is_empty() || languages.iter().any(|l| l == t.language))
        .filter(|t| lengths.is_empty() || lengths.contains(&t.length))
        .collect()
}

/// One of `texts` at random; `None` when there is none.
pub fn sample<'a>(texts: &[&'a Text], rng: &mut impl Rng) -> Option<&'a Text> {
    (!texts.is_empty()).then(|| texts[rng.random_range(0..texts.len())])
}

const fn text(language: &'static str, length: Length, text: &'static str) -> Text {
    Text { language, length, text }
}

use Length::{Long, Medium, Short};

/// Written for this crate.
const CORPUS: &[Text] = &[
    text("en", Short, "Yes, one moment please."),
    text("en", Short, "I have found your booking."),
    text("en", Short, "Is there anything else?"),
    text("en", Medium, "Your parcel left the depot this morning and should reach you before noon tomorrow."),
    text("en", Medium, "I can offer you a window seat on the seven thirty train, or an aisle seat an hour later."),
    text("en", Medium, "To change the number on your account, please tell me the last four digits of the old one."),
    text(
        "en",
        Long,
        "Thank you for waiting. I have looked at the last three invoices, and you were charged twice in \
         March. The amount of forty two pounds and sixteen pence will be back on your card within five working days.",
    ),
    text(
        "en",
        Long,
        "There are two ways to reset the router. You can hold the small button on the back for ten seconds, \
         or I can do it from here while you stay on the line. Which would you prefer?",
    ),
    text("de", Short, "Einen Augenblick, bitte."),
    text("de", Medium, "Ihr Termin ist am Donnerstag um Viertel nach neun in der Praxis am Marktplatz."),
    text("de", Medium, "Der Zug nach Leipzig fährt heute von Gleis sieben und hat etwa zwölf Minuten Verspätung."),
    text(
        "de",
        Long,
        "Ich habe Ihre Bestellung gefunden. Zwei der drei Artikel sind schon unterwegs, der dritte folgt \
         nächste Woche. Soll ich Ihnen eine Nachricht schicken, sobald er verpackt ist?",
    ),
    text("fr", Short, "Un instant, je vérifie."),
    text("fr", Medium, "Votre table est réservée pour quatre personnes samedi soir à vingt heures trente."),
    text(
        "fr",
        Long,
        "Je vois que votre carte a été bloquée hier soir après trois essais. Je peux la débloquer tout de \
         suite, mais il me faut d'abord votre date de naissance et le nom de votre agence.",
    ),
    text("es", Short, "Claro, ahora mismo."),
    text("es", Medium, "El técnico pasará por su casa el martes entre las diez y las doce de la mañana."),
    text(
        "es",
        Long,
        "He revisado su contrato y la tarifa actual termina a final de mes. Si quiere, puedo mantener el \
         mismo precio durante un año más sin ningún coste añadido.",
    ),
    text("it", Short, "Certo, un momento."),
    text("it", Medium, "La consegna è prevista per venerdì pomeriggio, tra le due e le quattro."),
    text(
        "it",
        Long,
        "Ho controllato i suoi dati e tutto è in ordine. Riceverà una conferma per posta elettronica \
         entro un'ora, e potrà modificare la prenotazione fino alla sera prima.",
    ),
    text("pt", Short, "Só um momento, por favor."),
    text("pt", Medium, "A sua consulta foi marcada para segunda-feira às onze horas com a doutora Marques."),
    text("pl", Medium, "Państwa paczka czeka w punkcie odbioru przy ulicy Długiej do końca tygodnia."),
    text("nl", Medium, "De monteur komt woensdag tussen acht en tien uur langs om de meter te vervangen."),
    text("ru", Medium, "Ваш заказ уже в пути и будет доставлен завтра после обеда."),
    text("tr", Medium, "Randevunuz perşembe günü saat üçte, ikinci kattaki bölümde olacak."),
    text("zh", Short, "好的，请稍等。"),
    text("zh", Medium, "您的包裹今天早上已经发出，预计明天中午之前送到。"),
    text("zh", Long, "我查到了您的订单。三件商品里有两件已经在路上，剩下的一件下周发货。需要我在发货的时候通知您吗？"),
    text("ja", Short, "少々お待ちください。"),
    text("ja", Medium, "ご予約は土曜日の午後六時、二名様で承っております。"),
    text("ko", Medium, "고객님의 예약은 금요일 오후 두 시로 변경되었습니다."),
    text("hi", Medium, "आपकी शिकायत दर्ज हो गई है और कल सुबह तक उसका समाधान हो जाएगा।"),
    text("ar", Medium, "تم تأكيد موعدك يوم الأحد في الساعة العاشرة صباحا."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_selection_that_names_what_there_is_finds_something() {
        assert!(languages().len() >= 12);
        for language in languages() {
            assert!(!select(&[language.to_owned()], &[]).is_empty());
        }
        for length in Length::ALL {
            assert!(select(&["en".to_owned()], &[length]).len() >= 2);
        }
        assert!(select(&["xx".to_owned()], &[]).is_empty());
        assert_eq!(sample(&[], &mut rand::rng()), None);
    }

    #[test]
    fn longer_texts_are_longer() {
        let mean = |length| {
            let texts = select(&["en".to_owned()], &[length]);
            texts.iter().map(|t| t.text.chars().count()).sum::<usize>() / texts.len()
        };
        assert!(mean(Length::Short) * 2 < mean(Length::Medium) && mean(Length::Medium) * 2 < mean(Length::Long));
    }
}
